"""What differs between a CUDA stream and the host: events, staging, memory figures.

Knows torch; never a plan, a model or the event loop.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Protocol

import psutil
import torch


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Blocks the calling thread, without the GIL, until the device is past the point."""


class Device(Protocol):
    """One device as the executor sees it."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def is_host(self) -> bool: ...

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device can copy from and to without blocking. uint8."""

    def record(self) -> Event:
        """Marks the end of what has been queued so far. Called on the launch thread."""

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        """Copies to staging memory after what is queued, beside what will be queued."""

    def enter_thread(self) -> None:
        """Called once on the launch thread before its first command."""

    def synchronize(self) -> None:
        """Waits for all that has been queued."""

    def is_lost(self) -> bool:
        """Whether nothing can be run any more. Asked after an error."""

    def free_bytes(self) -> int:
        """Memory that is free now."""


class HostDevice:
    """The CPU: every operation is done when its call returns.

    max_delay_s: tests set it, so that results reach their readers late by a random time.
    num_threads: of the kernels; None: as many as there are cores.
    """

    is_host = True

    def __init__(self, max_delay_s: float = 0.0, num_threads: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self._num_threads = num_threads
        self._max_delay_s = max_delay_s

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def record(self) -> Event:
        return _HostEvent(random.uniform(0.0, self._max_delay_s))

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        destination.copy_(source)
        return self.record()

    def synchronize(self) -> None:
        pass

    def is_lost(self) -> bool:
        return False

    def enter_thread(self) -> None:
        torch.set_grad_enabled(False)
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # of this thread's parallel regions

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)


class _HostEvent:
    def __init__(self, delay_s: float) -> None:
        self._ready_at = time.perf_counter() + delay_s
        self._delayed = threading.Event() if delay_s else None

    def wait(self) -> None:
        if self._delayed is not None:
            self._delayed.wait(max(0.0, self._ready_at - time.perf_counter()))


class CudaDevice:
    """One GPU with a stream of its own for the step sequence."""

    is_host = False

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._results = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def record(self) -> Event:
        return self._record(self._stream)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor) -> Event:
        self._results.wait_stream(self._stream)
        with torch.cuda.stream(self._results):
            destination.copy_(source, non_blocking=True)
        return self._record(self._results)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def is_lost(self) -> bool:
        """An error that has spoilt the context comes back from every later call."""
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def enter_thread(self) -> None:
        torch.set_grad_enabled(False)
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._stream)
        self.synchronize()  # weights and buffers were filled on the default stream

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    @staticmethod
    def _record(stream: torch.cuda.Stream) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return _CudaEvent(event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def open_device(name: str | None, num_threads: int | None = None) -> Device:
    """`cpu`, `cuda`, `cuda:1`, or None for a GPU where there is one.

    num_threads: of a host's kernels; None: as many as there are cores.

    Raises: ValueError for another name or a GPU that is not there.
    """
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name is None else name
    if chosen == "cpu":
        return HostDevice(num_threads=num_threads)
    kind, _, index = chosen.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {chosen} is not there; {torch.cuda.device_count()} GPUs found")
    return CudaDevice(int(index or 0))


def has_bf16_arithmetic(device: Device) -> bool:
    """Whether bf16 multiplies natively; a host without it converts every operand."""
    if not device.is_host:
        return torch.cuda.get_device_capability(device.torch_device) >= (8, 0)
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))
