"""The virtual arena against a driver that checks every call."""

from __future__ import annotations

import ctypes
import gc
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.graphs.virtual_memory import VirtualArena

GRANULARITY = 1 << 16
DEVICE = 3


class Code(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_VALUE = 1


class Names:
    """An enumeration of the binding: every name stands for itself."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeDriver:
    """The driver's rules for virtual memory; real host memory lies behind the addresses."""

    CUresult = Code
    CUmemAccess_flags = CUmemAllocationGranularity_flags = CUmemAllocationType = Names()
    CUmemLocationType = CUmemAllocationHandleType = CUdevice_attribute = Names()

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reserved: dict[int, int] = {}  # address -> size
        self.handles: dict[str, int] = {}  # handle -> size
        self.mapped: dict[int, str] = {}  # address -> handle
        self.accessible: set[int] = set()
        self.failing: dict[str, int] = {}  # call -> how many calls from now
        self._buffers: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                self.failing[name] -= 1
                if self.failing[name] < 0:
                    del self.failing[name]
                    return (Code.CUDA_ERROR_OUT_OF_MEMORY,)
            return found(*arguments)

        return call

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())

    def CUmemAccessDesc(self) -> SimpleNamespace:
        return SimpleNamespace()

    def cuInit(self, flags: int) -> tuple[Code]:
        return (Code.CUDA_SUCCESS,)

    def cuDeviceGet(self, index: int) -> tuple[Code, str]:
        return Code.CUDA_SUCCESS, f"device {index}"

    def cuDeviceGetAttribute(self, attribute: str, device: str) -> tuple[Code, int]:
        assert device == f"device {DEVICE}"
        return Code.CUDA_SUCCESS, 1

    def cuMemGetAllocationGranularity(self, properties: Any, option: str) -> tuple[Code, int]:
        assert option == "CU_MEM_ALLOC_GRANULARITY_MINIMUM"
        return Code.CUDA_SUCCESS, GRANULARITY

    def cuMemAddressReserve(
        self, size: int, alignment: int, address: int, flags: int
    ) -> tuple[Code, int]:
        assert size > 0 and size % GRANULARITY == 0 and (alignment, address, flags) == (0, 0, 0)
        buffer = ctypes.create_string_buffer(size + GRANULARITY)
        self._buffers.append(buffer)
        place = -(-ctypes.addressof(buffer) // GRANULARITY) * GRANULARITY
        self.reserved[place] = size
        return Code.CUDA_SUCCESS, place

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Code, str]:
        assert size % GRANULARITY == 0 and flags == 0
        assert properties.type == "CU_MEM_ALLOCATION_TYPE_PINNED"
        assert properties.location.type == "CU_MEM_LOCATION_TYPE_DEVICE"
        assert properties.location.id == DEVICE
        kind = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        assert properties.requestedHandleTypes == kind
        assert properties.allocFlags.gpuDirectRDMACapable == 1
        handle = f"handle {len(self.calls)}"
        self.handles[handle] = size
        return Code.CUDA_SUCCESS, handle

    def cuMemMap(
        self, address: int, size: int, offset: int, handle: str, flags: int
    ) -> tuple[Code]:
        assert self.reserved[address] == size == self.handles[handle]
        assert address not in self.mapped and (offset, flags) == (0, 0)
        self.mapped[address] = handle
        return (Code.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Code]:
        assert address in self.mapped and self.reserved[address] == size
        assert count == len(access) == 1 and access[0].location.id == DEVICE
        assert access[0].flags == "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"
        self.accessible.add(address)
        return (Code.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Code]:
        assert self.reserved[address] == size
        del self.mapped[address]
        self.accessible.discard(address)
        return (Code.CUDA_SUCCESS,)

    def cuMemRelease(self, handle: str) -> tuple[Code]:
        assert handle not in self.mapped.values()
        del self.handles[handle]
        return (Code.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Code]:
        assert address not in self.mapped
        assert self.reserved.pop(address) == size
        return (Code.CUDA_SUCCESS,)


def lend(address: int, size: int, owner: object) -> Tensor:
    block: Any = (ctypes.c_uint8 * size).from_address(address)
    block.owner = owner
    return torch.from_numpy(np.frombuffer(block, np.uint8))


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def arena(driver: FakeDriver) -> VirtualArena:
    return VirtualArena(DEVICE, driver, lend, lambda: driver.calls.append("synchronize"))


def test_every_tensor_has_a_range_and_an_accessible_allocation(
    driver: FakeDriver, arena: VirtualArena
) -> None:
    shapes = [(1,), (GRANULARITY // 4,), (GRANULARITY // 4 + 1,), (3, 5, 7)]
    tensors = [arena.empty("weights", shape, torch.float32) for shape in shapes]
    for tensor in tensors:
        tensor.copy_(values := torch.randn(tensor.shape))
        assert torch.equal(tensor, values)
    assert {tensor.data_ptr() for tensor in tensors} == set(driver.reserved) == driver.accessible
    assert sorted(driver.handles.values()) == [GRANULARITY] * 3 + [2 * GRANULARITY]
    assert arena.allocated_bytes("weights") == 5 * GRANULARITY
    assert arena.allocated_bytes("kv_cache") == 0


def test_release_and_resume_keep_addresses_and_other_tags(
    driver: FakeDriver, arena: VirtualArena
) -> None:
    weights = [arena.empty("weights", (10, i + 1), torch.bfloat16) for i in range(3)]
    cache = arena.empty("kv_cache", (10,), torch.float32)
    places = {tensor.data_ptr() for tensor in weights}
    driver.calls.clear()
    for _ in range(2):
        arena.release("weights")
    assert driver.calls.index("synchronize") < driver.calls.index("cuMemUnmap")
    assert driver.calls.count("cuMemUnmap") == driver.calls.count("cuMemRelease") == 3
    assert set(driver.reserved) == places | {cache.data_ptr()}
    assert set(driver.mapped) == driver.accessible == {cache.data_ptr()}
    assert arena.allocated_bytes("weights") == 3 * GRANULARITY
    driver.calls.clear()
    for _ in range(2):
        arena.resume("weights")
    assert driver.calls.count("cuMemCreate") == 3
    assert {tensor.data_ptr() for tensor in weights} == places
    assert driver.accessible == places | {cache.data_ptr()}


@pytest.mark.parametrize("released", [False, True])
def test_everything_goes_with_the_last_tensor(
    released: bool, driver: FakeDriver, arena: VirtualArena
) -> None:
    tensors = [arena.empty("weights", (10,), torch.float32) for _ in range(3)]
    view = tensors[0][3:]
    if released:
        arena.release("weights")
    del tensors
    gc.collect()
    assert len(driver.reserved) == 1
    del view
    gc.collect()
    assert not driver.reserved and not driver.mapped and not driver.handles
    assert arena.allocated_bytes("weights") == 0


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_failed_allocation_names_the_call_and_leaks_nothing(
    call: str, driver: FakeDriver, arena: VirtualArena
) -> None:
    driver.failing[call] = 0
    with pytest.raises(RuntimeError, match=f"^{call} failed: CUDA_ERROR_OUT_OF_MEMORY$"):
        arena.empty("weights", (10,), torch.float32)
    assert not driver.reserved and not driver.mapped and not driver.handles
    assert arena.allocated_bytes("weights") == 0


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_failed_resume_can_be_tried_again(
    call: str, driver: FakeDriver, arena: VirtualArena
) -> None:
    tensors = [arena.empty("kv_cache", (10,), torch.float32) for _ in range(4)]
    arena.release("kv_cache")
    driver.failing[call] = 2
    with pytest.raises(RuntimeError, match=f"^{call} failed"):
        arena.resume("kv_cache")
    assert len(driver.accessible) == len(driver.handles) == 2
    arena.resume("kv_cache")
    assert driver.accessible == {tensor.data_ptr() for tensor in tensors}
    assert len(driver.handles) == 4


def test_failed_reservation_names_the_call(driver: FakeDriver, arena: VirtualArena) -> None:
    driver.failing["cuMemAddressReserve"] = 0
    with pytest.raises(RuntimeError, match="cuMemAddressReserve failed: CUDA_ERROR_OUT_OF_MEMORY"):
        arena.empty("weights", (10,), torch.float32)
    assert not driver.handles
