"""What launches need to know of the GPU that they are for.

Knows no kernel.
"""

from __future__ import annotations

import contextlib
import functools
import threading
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


class _Assumed(threading.local):
    gpu: Gpu | None = None


_assumed = _Assumed()


def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind a tensor; a small one for the interpreter."""
    if _assumed.gpu is not None:
        return _assumed.gpu
    return _query(device) if device.type == "cuda" else Gpu(capability=90, processors=4)


@functools.cache
def _query(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    return Gpu(10 * found.major + found.minor, found.multi_processor_count)


@contextlib.contextmanager
def assume(gpu: Gpu) -> Iterator[None]:
    """This thread's launches inside are for this GPU, wherever their tensors are."""
    before, _assumed.gpu = _assumed.gpu, gpu
    try:
        yield
    finally:
        _assumed.gpu = before
