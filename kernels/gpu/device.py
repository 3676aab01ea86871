"""What launches need to know of the GPU that they are for.

Knows no kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    capability: int  # 10 x major + minor
    processors: int  # streaming multiprocessors

    @property
    def has_large_shared_memory(self) -> bool:
        """228 KB for a processor, as on H100 and B200; others have 100 to 164."""
        return self.capability // 10 in (9, 10)


_assumed: Gpu | None = None


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a tensor; a small one for the interpreter."""
    if _assumed is not None:
        return _assumed
    return _query(device) if device.type == "cuda" else Gpu(capability=90, processors=4)


@functools.cache
def _query(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    return Gpu(10 * found.major + found.minor, found.multi_processor_count)


@contextlib.contextmanager
def assume(gpu: Gpu) -> Iterator[None]:
    """Launches inside are for this GPU, wherever their tensors are: for compiling offline."""
    global _assumed
    _assumed = gpu
    try:
        yield
    finally:
        _assumed = None
