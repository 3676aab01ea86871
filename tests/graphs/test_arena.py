"""Memory by tag: what it gives back, what stays, and where it lies."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from treadle.graphs.arena import CudaArena, HostArena, open_arena
from treadle.kernels.gpu import cupy_stream

MB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.int64, torch.bool]
releases = pytest.mark.skipif(not HostArena.can_release, reason="only Linux takes memory back")


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 3, 1000), (1,), (0, 4)])
def test_host_tensors_are_aligned_and_hold_what_is_written(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    arena = HostArena()
    tensors = [arena.empty("weights", shape, dtype) for _ in range(3)]
    written = [torch.randint(0, 2, shape).to(dtype) for _ in tensors]
    for tensor, values in zip(tensors, written, strict=True):
        tensor.copy_(values)
    for tensor, values in zip(tensors, written, strict=True):
        assert tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, values)


@releases
def test_released_host_memory_goes_back_and_returns_to_its_address() -> None:
    arena = HostArena()
    size = 64 * MB
    weights = arena.empty("weights", (size // 4,), torch.float32)
    cache = arena.empty("kv_cache", (MB,), torch.bfloat16)
    cache.normal_()
    kept = cache.clone()
    address, before = weights.data_ptr(), rss()
    weights.fill_(1.0)
    written = rss()
    assert written - before >= 0.9 * size
    for _ in range(2):
        arena.release("weights")
    assert written - rss() >= 0.9 * size
    for _ in range(2):
        arena.resume("weights")
    values = torch.randn(1000)
    weights[-1000:] = values
    weights.narrow(0, 0, 1000).copy_(values)
    assert weights.data_ptr() == address and weights.numel() == size // 4
    assert torch.equal(weights[:1000], values) and torch.equal(weights[-1000:], values)
    assert torch.equal(cache, kept)


@releases
def test_unwritten_host_memory_is_not_committed() -> None:
    arena = HostArena()
    before = rss()
    tensor = arena.empty("kv_cache", (256 * MB,), torch.uint8)
    tensor[128 * MB] = 1
    assert rss() - before < 16 * MB


def test_resume_of_what_was_not_released_keeps_it() -> None:
    arena = HostArena()
    tensor = arena.empty("weights", (1000,), torch.float32)
    tensor.copy_(values := torch.randn(1000))
    arena.resume("weights")
    arena.resume("cuda_graph")
    assert torch.equal(tensor, values)


def test_host_bytes_are_counted_by_tag_and_go_with_the_tensor() -> None:
    arena = HostArena()
    a = arena.empty("weights", (3 * MB,), torch.uint8)
    b = arena.empty("weights", (MB,), torch.float32)
    c = arena.empty("tables", (10,), torch.int32)
    assert arena.allocated_bytes("weights") == 7 * MB
    assert c.nbytes <= arena.allocated_bytes("tables") < MB
    view = a[:10]
    del a, b
    gc.collect()
    assert arena.allocated_bytes("weights") == 3 * MB
    view.fill_(1)
    del view
    gc.collect()
    assert arena.allocated_bytes("weights") == 0


def test_host_tensor_outlives_its_arena() -> None:
    arena = HostArena()
    tensor = arena.empty("weights", (MB,), torch.float32)
    gone = weakref.ref(arena)
    del arena
    gc.collect()
    assert gone() is None
    tensor.copy_(values := torch.randn(MB))
    assert torch.equal(tensor, values)


def test_a_host_that_cannot_release_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostArena, "can_release", False)
    arena = HostArena()
    arena.empty("weights", (10,), torch.float32)
    with pytest.raises(RuntimeError, match=f"cannot be released on {sys.platform}"):
        arena.release("weights")


def test_the_host_needs_no_memory_saver() -> None:
    assert isinstance(open_arena(torch.device("cpu"), memory_saver=False), HostArena)
    assert isinstance(open_arena(torch.device("cpu"), memory_saver=True), HostArena)


@pytest.mark.parametrize(("memory_saver", "missing"), [(False, "cupy"), (True, "cuda.bindings")])
def test_a_missing_package_is_named(
    memory_saver: bool, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None if missing == "cupy" else SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(RuntimeError, match=f"needs {missing}.*pip install 'treadle"):
        open_arena(torch.device("cuda"), memory_saver)


class FakeCupy:
    """As much of CuPy as an arena uses, over the host's memory."""

    uint8 = np.uint8

    def __init__(self) -> None:
        self.log: list[str] = []
        self.cuda = self

    class Memory:
        def __init__(self, size: int) -> None:
            self._bytes = ctypes.create_string_buffer(size + 256)
            self.ptr = -(-ctypes.addressof(self._bytes) // 256) * 256

    def Device(self, index: int) -> FakeCupy:
        assert index == 0
        return self

    def __enter__(self) -> None:
        self.log.append("enter")

    def __exit__(self, *_: object) -> None:
        self.log.append("exit")

    def UnownedMemory(self, address: int, size: int, owner: object, device: int) -> Any:
        assert size > 0 and device == 0
        return SimpleNamespace(address=address, owner=owner)

    def MemoryPointer(self, memory: Any, offset: int) -> Any:
        return SimpleNamespace(memory=memory, offset=offset)

    def ndarray(self, shape: tuple[int], dtype: type, memptr: Any) -> Any:
        block: Any = (ctypes.c_uint8 * shape[0]).from_address(memptr.memory.address + memptr.offset)
        block.owner = memptr.memory.owner
        return np.frombuffer(block, dtype)


@pytest.fixture
def cuda_arena(monkeypatch: pytest.MonkeyPatch) -> CudaArena:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cupy_stream, "current_stream", lambda device: fake)
    arena = open_arena(torch.device("cuda"), memory_saver=False)
    assert isinstance(arena, CudaArena)
    return arena


def test_cuda_tensors_keep_their_allocation_and_it_goes_with_them(cuda_arena: CudaArena) -> None:
    tensors = [cuda_arena.empty("weights", (7, 30), dtype) for dtype in DTYPES]
    written = [torch.randint(0, 2, (7, 30)).to(dtype) for dtype in DTYPES]
    for tensor, values in zip(tensors, written, strict=True):
        tensor.copy_(values)
    gc.collect()
    for tensor, values in zip(tensors, written, strict=True):
        assert torch.equal(tensor, values) and tensor.data_ptr() % 256 == 0
    assert cuda_arena.allocated_bytes("weights") == sum(tensor.nbytes for tensor in tensors)
    assert cuda_arena.allocated_bytes("kv_cache") == 0
    del tensors, tensor
    gc.collect()
    assert cuda_arena.allocated_bytes("weights") == 0


def test_plain_cuda_memory_names_the_flag_that_makes_it_releasable(cuda_arena: CudaArena) -> None:
    assert not cuda_arena.can_release
    with pytest.raises(RuntimeError, match="--enable-memory-saver"):
        cuda_arena.release("kv_cache")
    cuda_arena.resume("kv_cache")


@pytest.mark.gpu
@pytest.mark.parametrize("memory_saver", [False, True])
def test_gpu_memory_is_lent_released_and_resumed(memory_saver: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("cupy")
    if memory_saver:
        pytest.importorskip("cuda.bindings")
    device = torch.device("cuda", 0)
    arena = open_arena(device, memory_saver)
    shape = (64, MB)
    tensor = arena.empty("kv_cache", shape, torch.bfloat16)
    address = tensor.data_ptr()
    assert tensor.device == device and address % 256 == 0
    tensor.normal_()
    assert torch.isfinite(tensor).all()
    assert arena.allocated_bytes("kv_cache") >= 2 * math.prod(shape)
    if not memory_saver:
        return
    free = torch.cuda.mem_get_info(device)[0]
    arena.release("kv_cache")
    assert torch.cuda.mem_get_info(device)[0] - free >= 2 * math.prod(shape)
    arena.resume("kv_cache")
    assert tensor.data_ptr() == address
    assert (tensor.fill_(3) == 3).all()
