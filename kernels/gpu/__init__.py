"""Triton kernels for NVIDIA GPUs, one family per file, loaded only when a tensor lies on one.

Knows nothing of graphs: every launch has a shape that the host knows without asking the device.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from torch import Tensor

HAS_TRITON: Final = importlib.util.find_spec("triton") is not None


def serves(x: Tensor) -> bool:
    """Whether Triton's kernels take this tensor; else torch's operators do."""
    return x.is_cuda and HAS_TRITON
