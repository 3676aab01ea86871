"""Page copies against plain loops: the host's operators, and the CUDA source on a CPU or a GPU."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.kernels.gpu import page_copy as gpu_page_copy
from treadle.kernels.page_copy import (
    DevicePool,
    Direction,
    HostPool,
    Layout,
    copy_pages,
    host_pool,
)

LAYERS, KV_HEADS, HEAD_DIM = 3, 3, 8
CACHE_PAGES, POOL_PAGES = 11, 7
TARGETS = ("sm_80", "sm_90", "sm_100")
C_TYPES = {"uint64": ctypes.c_uint64, "uint32": ctypes.c_uint32, "int64": ctypes.c_int64,
           "int32": ctypes.c_int32}  # fmt: skip

# What the kernel needs of CUDA, for a C++ compiler: its threads share nothing and never meet, so
# that one after the other does the same.
CUDA_ON_A_CPU = r"""
struct Index { unsigned x; };
static Index gridDim, blockDim, blockIdx, threadIdx;
struct alignas(16) uint4 { unsigned x, y, z, w; };
static uint4 __ldcs(const uint4* p) { return *p; }
static void __stcs(uint4* p, uint4 v) { *p = v; }
#define __global__
#define __launch_bounds__(n)
"""
RUN_ALL_THREADS = r"""
extern "C" void run(unsigned blocks, unsigned threads, const long long* a, uint4* b,
                    const long long* c, const long long* d, unsigned e, unsigned f, unsigned g,
                    unsigned h, long long i, long long j, long long k, long long l, int m) {
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            copy_pages(a, b, c, d, e, f, g, h, i, j, k, l, m);
}
"""

CopyPages = Callable[..., None]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> CopyPages:
    """The CUDA source as a C++ compiler makes it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("page_copy")
    source = folder / "kernel.cpp"
    source.write_text(CUDA_ON_A_CPU + gpu_page_copy.SOURCE + RUN_ALL_THREADS)
    library = folder / "kernel.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    run = ctypes.CDLL(str(library)).run

    def copy(direction: Direction, device: DevicePool, host: HostPool, *rest: object) -> None:
        device_pages, host_pages, layers = rest
        assert isinstance(device_pages, Tensor) and isinstance(host_pages, Tensor)
        assert isinstance(layers, range) or layers is None
        layers = range(LAYERS) if layers is None else layers
        arguments = gpu_page_copy.launch_arguments(
            direction, device, host, device_pages, host_pages, layers
        )
        values = [C_TYPES[value.dtype.name](value.item()) for value in arguments]
        run(2, 96, *values)  # fewer warps than pieces

    return copy


@pytest.fixture(params=["host", "cuda source"])
def copy(request: pytest.FixtureRequest) -> CopyPages:
    if request.param == "host":
        return copy_pages
    made: CopyPages = request.getfixturevalue("interpreted")
    return made


def make_cache(page_size: int, dtype: torch.dtype, device: str = "cpu") -> DevicePool:
    shape = (CACHE_PAGES * page_size, KV_HEADS, HEAD_DIM)
    layers = [
        (
            torch.randn(shape).to(device=device, dtype=dtype),
            torch.randn(shape).to(device=device, dtype=dtype),
        )
        for _ in range(LAYERS)
    ]
    return DevicePool.of(layers)


def make_pool(layout: Layout, cache: DevicePool, page_size: int, pin: bool = False) -> HostPool:
    pool = host_pool(layout, POOL_PAGES, page_size, cache.layers, pin)
    pool.data.normal_()
    return pool


def pick(count: int) -> tuple[Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.tensor(random.sample(range(pages), count), dtype=torch.int64)
        for pages in (CACHE_PAGES, POOL_PAGES)
    )


def by_page(x: Tensor) -> Tensor:
    return x.view(CACHE_PAGES, -1, KV_HEADS, HEAD_DIM)


def numbers(cache: DevicePool) -> list[list[list[float]]]:
    return [[x.float().flatten().tolist() for x in layer] for layer in cache.layers]


def expected_copy(
    direction: Direction, cache: DevicePool, pool: HostPool, pairs: list[list[int]], layers: range
) -> tuple[list[list[list[float]]], list[float]]:
    """What cache and pool hold afterwards, number by number."""
    tokens = cache.layers[0][0].shape[0] // CACHE_PAGES
    piece = tokens * KV_HEADS * HEAD_DIM
    cached, pooled = numbers(cache), pool.data.float().flatten().tolist()
    for device_page, host_page in pairs:
        for layer in layers:
            for kind in (0, 1):
                if pool.layout == "page_first":
                    place = ((host_page * 2 + kind) * LAYERS + layer) * piece
                else:
                    place = ((kind * LAYERS + layer) * POOL_PAGES + host_page) * piece
                for i in range(piece):
                    at = device_page * piece + i
                    if direction == "to_host":
                        pooled[place + i] = cached[layer][kind][at]
                    else:
                        cached[layer][kind][at] = pooled[place + i]
    return cached, pooled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("direction", get_args(Direction))
def test_copies_the_named_pages_and_no_other(
    copy: CopyPages,
    direction: Direction,
    layout: Layout,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    cache = make_cache(page_size, dtype)
    pool = make_pool(layout, cache, page_size)
    for count, layers in ((1, None), (4, range(1, 3)), (POOL_PAGES, None)):
        device_pages, host_pages = pick(count)
        pairs = torch.stack([device_pages, host_pages], dim=1).tolist()
        expected = expected_copy(direction, cache, pool, pairs, layers or range(LAYERS))
        copy(direction, cache, pool, device_pages, host_pages, layers)
        assert (numbers(cache), pool.data.float().flatten().tolist()) == expected


@pytest.mark.parametrize("layout", get_args(Layout))
def test_round_trip_brings_pages_back_to_other_places(copy: CopyPages, layout: Layout) -> None:
    cache = make_cache(16, torch.bfloat16)
    pool = make_pool(layout, cache, 16)
    device_pages, host_pages = pick(POOL_PAGES)
    before = [by_page(x)[device_pages] for kv in cache.layers for x in kv]
    copy("to_host", cache, pool, device_pages, host_pages, None)
    for layer in cache.layers:
        for x in layer:
            x.normal_()
    others = pick(POOL_PAGES)[0]
    copy("to_device", cache, pool, others, host_pages, None)
    after = [by_page(x)[others] for kv in cache.layers for x in kv]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_no_pages_change_nothing(copy: CopyPages) -> None:
    cache = make_cache(1, torch.float32)
    pool = make_pool("page_first", cache, 1)
    before, pooled = numbers(cache), pool.data.clone()
    nothing = torch.empty(0, dtype=torch.int64)
    for direction in get_args(Direction):
        copy(direction, cache, pool, nothing, nothing, None)
    assert numbers(cache) == before
    assert torch.equal(pool.data, pooled)


def test_kernel_refuses_pieces_that_are_not_whole_words() -> None:
    k = torch.randn(4, 1, 4).bfloat16()
    cache = DevicePool.of([(k, k.clone())])
    pool = host_pool("page_first", 2, 1, cache.layers, pin=False)
    page = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="a page of 8 bytes per layer is not a multiple of 16"):
        gpu_page_copy.launch_arguments("to_host", cache, pool, page, page, range(1))


@pytest.mark.parametrize("target", TARGETS)
def test_kernel_compiles_without_spills(target: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    source = tmp_path / "page_copy.cu"
    source.write_text(gpu_page_copy.SOURCE)
    done = subprocess.run(
        [nvcc, f"-arch={target}", "-cubin", "-Xptxas", "-v", "-Werror", "all-warnings", source,
         "-o", tmp_path / "page_copy.cubin"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("direction", get_args(Direction))
@pytest.mark.parametrize("ids_on", ["cuda", "pinned"])
def test_copies_on_a_gpu(
    direction: Direction, layout: Layout, ids_on: Literal["cuda", "pinned"]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cache = make_cache(16, torch.bfloat16, "cuda")
    pool = make_pool(layout, cache, 16, pin=True)
    device_pages, host_pages = pick(POOL_PAGES)
    pairs = torch.stack([device_pages, host_pages], dim=1).tolist()
    expected = expected_copy(direction, cache, pool, pairs, range(LAYERS))
    ids = [x.cuda() if ids_on == "cuda" else x.pin_memory() for x in (device_pages, host_pages)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy_pages(direction, cache, pool, ids[0], ids[1])
    stream.synchronize()
    assert (numbers(cache), pool.data.float().flatten().tolist()) == expected


def test_launch_passes_types_of_the_kernels_parameters() -> None:
    cache = make_cache(1, torch.float32)
    pool = make_pool("layer_first", cache, 1)
    page = torch.zeros(1, dtype=torch.int64)
    arguments = gpu_page_copy.launch_arguments("to_host", cache, pool, page, page, range(LAYERS))
    head = gpu_page_copy.SOURCE.partition("copy_pages(")[2].partition(")\n{")[0]
    declared = [line.split("//")[0].strip() for line in head.splitlines() if line.strip()]
    kinds = [
        np.uint64 if "*" in line else np.uint32 if "unsigned" in line
        else np.int64 if "long long" in line else np.int32
        for line in declared
    ]  # fmt: skip
    assert [type(value) for value in arguments] == kinds
