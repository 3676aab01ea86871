"""What the device can do at best, measured in the same run, and how calls are timed.

Knows torch only; never a kernel of the engine.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from treadle.perf.gpu.sections import Values

_COPY_BYTES = 2 << 30
_MATMUL = 8192


@dataclass(frozen=True, slots=True)
class Peaks:
    bytes_per_s: float  # of a copy: read and written together
    bf16_flops: float

    def values(self) -> Values:
        return {"copy_gb_s": self.bytes_per_s / 1e9, "bf16_tflops": self.bf16_flops / 1e12}


@functools.cache
def peaks(device: str) -> Peaks:
    """On a CPU with sizes that take no time."""
    is_gpu = device != "cpu"
    source = torch.empty(_COPY_BYTES if is_gpu else 1 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / time_s(lambda: target.copy_(source), device)
    size = _MATMUL if is_gpu else 64
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    multiplied = 2 * size**3 / time_s(lambda: torch.mm(a, b), device)
    return Peaks(copied, multiplied)


def time_s(call: Callable[[], object], device: str, budget_s: float = 0.15) -> float:
    """Seconds of one call on a GPU: the median of five batches, so long that launches hide.

    On a CPU, where only the check itself is tried, of a single call.
    """
    call()
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    once = max(time.perf_counter() - started, 1e-6)
    if device == "cpu":
        return once
    count = max(1, min(200, int(budget_s / 5 / once)))
    return statistics.median(_batch(call, count) for _ in range(5)) / count


def _batch(call: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
