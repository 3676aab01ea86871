"""torch's current stream as one of CuPy's.

Knows nothing of what runs there.
"""

from __future__ import annotations

from typing import Any

import torch


def current_stream(device: torch.device) -> Any:
    """A cupy.cuda.Stream; as a context, what CuPy does inside is ordered with torch's work."""
    import cupy

    return cupy.cuda.Stream.from_external(_TorchStream(device))


class _TorchStream:
    """The CUDA stream protocol, which torch's own streams speak only since some release."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self._stream.cuda_stream)
