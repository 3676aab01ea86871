"""GPU memory whose pages come and go behind addresses that stay: CUDA virtual memory management.

Knows the driver's calls and bytes; never what a tensor means, nor how one is made of an address.
Source: CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Lend = Callable[[int, int, object], Tensor]  # address, bytes, owner -> [bytes] uint8


class VirtualArena:
    """An arena with one address range and one exportable allocation per tensor.

    An allocation's size is a multiple of the granularity, 2 MiB on the GPUs of today. Copies
    between such memory and the host or another GPU can be slower than those of plain allocations,
    so it is an arena to ask for.
    """

    can_release = True

    def __init__(
        self,
        device_index: int,
        driver: Any,  # cuda.bindings.driver, which has no types
        lend: Lend,
        synchronize: Callable[[], None],
    ) -> None:
        """synchronize: waits for the device, so that nothing uses memory that is unmapped."""
        self._memory = _DeviceMemory(driver, device_index)
        self._lend = lend
        self._synchronize = synchronize
        self._ranges: defaultdict[str, list[_Range]] = defaultdict(list)
        self._released: set[str] = set()

    def empty(self, tag: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert tag not in self._released, f"{tag} is released"
        count = math.prod(shape) * dtype.itemsize
        block = _Range(self._memory, max(count, 1))
        try:
            block.map()
        except RuntimeError:
            block.free()
            raise
        self._ranges[tag].append(block)
        owner = _Owner()
        # the process's end frees everything, and the driver may be gone by then
        weakref.finalize(owner, self._free, tag, block).atexit = False
        return self._lend(block.address, count, owner).view(dtype).view(tuple(shape))

    def release(self, tag: str) -> None:
        self._released.add(tag)
        self._synchronize()
        for block in self._ranges[tag]:
            block.unmap()

    def resume(self, tag: str) -> None:
        for block in self._ranges[tag]:
            block.map()
        self._released.discard(tag)

    def allocated_bytes(self, tag: str) -> int:
        return sum(block.size for block in self._ranges[tag])

    def _free(self, tag: str, block: _Range) -> None:
        self._synchronize()
        self._ranges[tag].remove(block)
        block.free()


class _Owner:
    """What a tensor keeps alive: when it goes, the tensor's memory goes."""


class _DeviceMemory:
    """Driver calls that raise, and what all allocations on one GPU have in common."""

    def __init__(self, driver: Any, device_index: int) -> None:
        self.driver = driver
        self.call("cuInit", 0)
        self.properties = self._properties(device_index)
        self.access = driver.CUmemAccessDesc()
        self.access.location = self.properties.location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granularity = int(
            self.call(
                "cuMemGetAllocationGranularity",
                self.properties,
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )

    def call(self, name: str, *arguments: object) -> Any:
        """The call's value, if it has one.

        Raises: RuntimeError naming the call and the driver's error.
        """
        error, *values = getattr(self.driver, name)(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {error.name}")
        return values[0] if values else None

    def _properties(self, device_index: int) -> Any:
        driver = self.driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device_index
        kinds = driver.CUmemAllocationHandleType
        properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        attributes = driver.CUdevice_attribute
        has_rdma = self.call(
            "cuDeviceGetAttribute",
            attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            self.call("cuDeviceGet", device_index),
        )
        # a network card reads such memory only where it was asked for
        properties.allocFlags.gpuDirectRDMACapable = int(bool(has_rdma))
        return properties


class _Range:
    """A reserved address range, and the allocation behind it while there is one."""

    def __init__(self, memory: _DeviceMemory, num_bytes: int) -> None:
        self.size = -(-num_bytes // memory.granularity) * memory.granularity
        self._memory = memory
        self._handle: Any = None
        self._pointer = memory.call("cuMemAddressReserve", self.size, 0, 0, 0)

    @property
    def address(self) -> int:
        return int(self._pointer)

    def map(self) -> None:
        if self._handle is not None:
            return
        call, pointer, size = self._memory.call, self._pointer, self.size
        handle = call("cuMemCreate", size, self._memory.properties, 0)
        try:
            call("cuMemMap", pointer, size, 0, handle, 0)
            try:
                call("cuMemSetAccess", pointer, size, [self._memory.access], 1)
            except RuntimeError:
                call("cuMemUnmap", pointer, size)
                raise
        except RuntimeError:
            call("cuMemRelease", handle)
            raise
        self._handle = handle

    def unmap(self) -> None:
        if self._handle is None:
            return
        self._memory.call("cuMemUnmap", self._pointer, self.size)
        self._memory.call("cuMemRelease", self._handle)
        self._handle = None

    def free(self) -> None:
        self.unmap()
        self._memory.call("cuMemAddressFree", self._pointer, self.size)
