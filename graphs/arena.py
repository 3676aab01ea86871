"""Memory for tensors, by tag, that can go back to the system and return to the same addresses.

Knows bytes and addresses; never what a tensor means. NumPy owns host memory and CuPy device memory,
both lend it to torch as bytes. Captured graphs and recorded tapes keep addresses: none ever moves.
"""

from __future__ import annotations

import importlib
import math
import mmap
import sys
import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from treadle.graphs.virtual_memory import VirtualArena

ReleasableTag = Literal["weights", "kv_cache", "cuda_graph"]
Tag = Literal[ReleasableTag, "tables"]  # tables are small, and stay


class Arena(Protocol):
    """Where the tensors of one device lie. Memory lives as long as a tensor in it."""

    @property
    def can_release(self) -> bool:
        """Whether `release` gives memory back."""

    def empty(self, tag: Tag, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, aligned to 64 bytes on a host and 256 on a GPU. Not initialised.

        The tag must not be released at the moment.
        """

    def release(self, tag: ReleasableTag) -> None:
        """Gives the tag's memory back, once all work on it is done; addresses stay reserved.

        Until `resume` its tensors must not be touched. Releasing twice changes nothing.
        Raises: RuntimeError where memory cannot be released.
        """

    def resume(self, tag: ReleasableTag) -> None:
        """Puts memory behind the tag's addresses again; what it holds is undefined.

        Resuming what is not released changes nothing.
        Raises: RuntimeError when memory is short; it can be tried again.
        """

    def allocated_bytes(self, tag: Tag) -> int:
        """What the tag's tensors take, rounded up as the system does, released or not."""


class HostArena:
    """Private anonymous mappings, one per tensor; a page is committed when it is first written.

    Huge pages are not asked for: weights stream no faster from them, and KV would be committed in
    larger pieces than it is written.
    """

    can_release = sys.platform == "linux"  # elsewhere the advice need not take effect

    def __init__(self) -> None:
        self._maps: defaultdict[str, weakref.WeakSet[mmap.mmap]] = defaultdict(weakref.WeakSet)

    def empty(self, tag: Tag, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = math.prod(shape) * dtype.itemsize
        size = _round_up(max(count, 1), mmap.PAGESIZE)
        if hasattr(mmap, "MAP_PRIVATE"):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            memory = mmap.mmap(-1, size, flags=flags)
        else:
            memory = mmap.mmap(-1, size)
        self._maps[tag].add(memory)
        return _view(from_dlpack(np.frombuffer(memory, np.uint8, count)), shape, dtype)

    def release(self, tag: ReleasableTag) -> None:
        if not self.can_release:
            raise RuntimeError(f"memory cannot be released on {sys.platform}")
        for memory in self._maps[tag]:
            memory.madvise(mmap.MADV_DONTNEED)

    def resume(self, tag: ReleasableTag) -> None:
        """Nothing to do: the next write commits a page."""

    def allocated_bytes(self, tag: Tag) -> int:
        return sum(len(memory) for memory in self._maps[tag])


class CudaArena:
    """Plain device allocations of CuPy, one per tensor."""

    can_release = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._owners: defaultdict[str, weakref.WeakSet[_Owner]] = defaultdict(weakref.WeakSet)

    def empty(self, tag: Tag, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        import cupy

        count = math.prod(shape) * dtype.itemsize
        with cupy.cuda.Device(self._device.index):
            memory = cupy.cuda.Memory(max(count, 1))  # past CuPy's pool: nothing is kept back
        owner = _Owner(memory, count)
        self._owners[tag].add(owner)
        return _view(_lend(self._device, memory.ptr, count, owner), shape, dtype)

    def release(self, tag: ReleasableTag) -> None:
        raise RuntimeError(f"{tag} memory can be released only with --enable-memory-saver")

    def resume(self, tag: ReleasableTag) -> None:
        """Nothing is ever released."""

    def allocated_bytes(self, tag: Tag) -> int:
        return sum(owner.size for owner in self._owners[tag])


class _Owner:
    """Keeps an allocation for its tensor, and can be referred to weakly."""

    __slots__ = ("__weakref__", "memory", "size")

    def __init__(self, memory: Any, size: int) -> None:
        self.memory = memory
        self.size = size


def open_arena(device: torch.device, memory_saver: bool) -> Arena:
    """memory_saver: a GPU's memory can be released; a host's always can.

    Raises: RuntimeError when a package that the device needs is not installed.
    """
    if device.type == "cpu":
        return HostArena()
    device = torch.device(device.type, device.index or 0)
    _import("cupy")
    if not memory_saver:
        return CudaArena(device)
    driver = _import("cuda.bindings.driver")
    synchronize = partial(torch.cuda.synchronize, device)
    return VirtualArena(device.index, driver, partial(_lend, device), synchronize)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"GPU memory needs {name}: pip install 'treadle[cuda]'") from error


def _lend(device: torch.device, address: int, size: int, owner: object) -> Tensor:
    """[size] uint8 on the GPU; the tensor keeps the owner alive."""
    import cupy

    from treadle.kernels.gpu.cupy_stream import current_stream

    memory = cupy.cuda.UnownedMemory(address, max(size, 1), owner, device.index)
    with cupy.cuda.Device(device.index), current_stream(device):
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return from_dlpack(cupy.ndarray((size,), cupy.uint8, memptr=pointer))


def _view(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return memory.view(dtype).view(tuple(shape))


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
