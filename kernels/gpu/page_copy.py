"""Copies of KV pages between device memory and mapped host memory, in one launch.

Knows page ids and strides only. A copy engine wants a call per contiguous piece, and a page has two
per layer; a few blocks that read and write over the bus need one launch for all of them, and leave
the other processors to the model.

Axes: as in `treadle.kernels.page_copy`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor

from treadle.kernels.gpu.cupy_stream import current_stream

if TYPE_CHECKING:
    from treadle.kernels.page_copy import DevicePool, Direction, HostPool

WORD: Final = 16  # bytes that a thread moves at once
THREADS: Final = 512
# Bytes on their way: 32 blocks x 512 threads x 4 words of 16 bytes = 1 MiB, several times what a
# bus of 64 GB/s with 2 us from request to answer holds (128 KB).
BLOCKS: Final = 32

# One warp moves one piece: a layer's keys, or values, of one page. Loads come before stores, so
# that a thread has four requests under way. What is copied is not read again soon: the streaming
# loads and stores leave the caches to the model.
SOURCE: Final = r"""
extern "C" __global__ void __launch_bounds__(512) copy_pages(
    const long long* __restrict__ caches,  // [2, all layers] addresses
    uint4* __restrict__ pool,
    const long long* __restrict__ device_pages,
    const long long* __restrict__ host_pages,
    unsigned pages,
    unsigned first_layer,
    unsigned layers,
    unsigned all_layers,
    long long words,       // of a piece
    long long kind_stride, // of the pool, in words
    long long layer_stride,
    long long page_stride,
    int to_host)
{
    const unsigned lane = threadIdx.x % 32;
    const unsigned warps = gridDim.x * (blockDim.x / 32);
    const unsigned first = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    for (unsigned piece = first; piece < pages * layers * 2; piece += warps) {
        const unsigned kind = piece % 2;
        const unsigned layer = first_layer + piece / 2 % layers;
        const unsigned page = piece / 2 / layers;
        uint4* cache = (uint4*)caches[kind * all_layers + layer] + device_pages[page] * words;
        uint4* host = pool + kind * kind_stride + layer * layer_stride
            + host_pages[page] * page_stride;
        const uint4* from = to_host ? cache : host;
        uint4* to = to_host ? host : cache;
        long long i = lane;
        for (; i + 96 < words; i += 128) {
            const uint4 a = __ldcs(from + i);
            const uint4 b = __ldcs(from + i + 32);
            const uint4 c = __ldcs(from + i + 64);
            const uint4 d = __ldcs(from + i + 96);
            __stcs(to + i, a);
            __stcs(to + i + 32, b);
            __stcs(to + i + 64, c);
            __stcs(to + i + 96, d);
        }
        for (; i < words; i += 32) __stcs(to + i, __ldcs(from + i));
    }
}
"""


def copy_pages(
    direction: Direction,
    device: DevicePool,
    host: HostPool,
    device_pages: Tensor,  # [n] int64, on the device or pinned
    host_pages: Tensor,  # [n] int64, on the device or pinned
    layers: range,
) -> None:
    """As `treadle.kernels.page_copy.copy_pages`, on torch's current stream.

    Raises: ValueError when a layer's page is not a whole number of 16-byte words.
    """
    if not len(device_pages) or not layers:
        return
    arguments = launch_arguments(direction, device, host, device_pages, host_pages, layers)
    pieces = 2 * len(layers) * len(device_pages)
    blocks = min(BLOCKS, -(-pieces // (THREADS // 32)))
    with current_stream(device.pointers.device):
        _kernel()((blocks,), (THREADS,), arguments)


def launch_arguments(
    direction: Direction,
    device: DevicePool,
    host: HostPool,
    device_pages: Tensor,
    host_pages: Tensor,
    layers: range,
) -> tuple[np.generic, ...]:
    """The kernel's arguments as the values that are passed."""
    item = host.data.itemsize
    kind_stride, layer_stride, page_stride = (
        stride * item // WORD for stride in host.by_layer.stride()[:3]
    )
    piece = host.by_layer[0, 0, 0].numel() * item
    if piece % WORD:
        raise ValueError(f"a page of {piece} bytes per layer is not a multiple of {WORD}")
    pointers = (device.pointers, host.data, device_pages, host_pages)
    counts = (len(device_pages), layers.start, len(layers), len(device.layers))
    return (
        *(np.uint64(tensor.data_ptr()) for tensor in pointers),
        *(np.uint32(count) for count in counts),
        *(np.int64(words) for words in (piece // WORD, kind_stride, layer_stride, page_stride)),
        np.int32(direction == "to_host"),
    )


@functools.cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(SOURCE, "copy_pages")
