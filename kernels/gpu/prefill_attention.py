"""Attention of rows with several queries: a cached prefix and a causal chunk, ragged rows.

Knows lengths only on the device: a program finds its row from cu_seqlens, the grid is the most
tiles that so many tokens in so many rows can need.

Axes: T tokens, R rows, H query heads, K kv heads, G = H / K, D head dim, M queries times heads.
Dao, FlashAttention-2, 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.kernels.gpu.attention_core import (
    INDICES,
    accumulate,
    add_sink,
    gather,
    score,
    slots_of,
)
from treadle.kernels.gpu.device import Gpu, gpu_of
from treadle.kernels.paged_attention import AttentionMeta


def prefill_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, K, D]
    v_cache: Tensor,  # [N, K, D]
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    sinks: Tensor | None,  # [H] fp32
    softcap: float | None,
    out: Tensor,  # [T, H, D] contiguous, written
    skip_single: bool = False,
) -> None:
    """skip_single: leaves rows of one query to the decode kernel."""
    rows, (tokens, q_heads, dim), kv_heads = meta.seq_lens.shape[0], q.shape, k_cache.shape[1]
    group = q_heads // kv_heads
    block_d = max(16, triton.next_power_of_2(dim))
    longest = meta.max_q_len * group
    block_m, block_n, num_warps, num_stages = tile(gpu_of(q.device), block_d, q.dtype, longest)
    heads = min(group, block_m)
    queries = block_m // heads
    assert q.stride(2) == k_cache.stride(2) == v_cache.stride(2) == 1 and out.is_contiguous()
    prefill_kernel[(tokens // queries + rows, kv_heads * triton.cdiv(group, heads))](
        q, k_cache, v_cache, q if sinks is None else sinks, meta.cu_seqlens_q, meta.seq_lens,
        meta.req_slot, meta.page_table, out, scale, rows, q.stride(0), q.stride(1),
        *k_cache.stride()[:2], *v_cache.stride()[:2], meta.page_table.stride(0),
        H=q_heads, G=group, HEADS=heads, QUERIES=queries, D=dim, BLOCK_D=block_d, BLOCK_M=block_m,
        BLOCK_N=block_n, PAGE_SIZE=meta.page_size, WINDOW=window or 0, SOFTCAP=softcap or 0.0,
        HAS_SINKS=sinks is not None, SKIP_SINGLE=skip_single,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def tile(gpu: Gpu, block_d: int, dtype: torch.dtype, queries: int) -> tuple[int, int, int, int]:
    """(M, keys of a block, warps, stages), the largest that keep to the registers.

    queries: the longest row's, times heads of a group. Registers and spills: docs/kernels.md.
    """
    if dtype is torch.float32:
        return (32, 16, 4, 1) if block_d <= 128 else (16, 16, 4, 1)
    is_large = gpu.has_large_shared_memory
    if block_d > 128:
        return (64, 64, 8, 2) if is_large else (64, 32, 8, 2)
    if queries <= 64:
        return 64, 64, 4 if is_large or block_d <= 64 else 8, 3
    return 128, 64 if is_large or block_d <= 64 else 32, 8, 3


@triton.jit(do_not_specialize=["rows", "table_r"], do_not_specialize_on_alignment=INDICES)
def prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    sinks: tl.tensor,  # [H]
    cu_seqlens_q: tl.tensor,  # [R + 1]
    seq_lens: tl.tensor,  # [R]
    req_slot: tl.tensor,  # [R]
    page_table: tl.tensor,  # [S, P]
    out: tl.tensor,  # [T, H, D]
    scale: tl.tensor, rows: tl.tensor,  # R
    q_t: tl.tensor, q_h: tl.tensor, k_n: tl.tensor, k_h: tl.tensor, v_n: tl.tensor,  # strides
    v_h: tl.tensor, table_r: tl.tensor,
    H: tl.constexpr, G: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr,  # of one tile
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, SKIP_SINGLE: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: tiles, kv heads times blocks of their query heads."""
    row, start, q_len, first = _find(tl.program_id(0), cu_seqlens_q, rows, QUERIES)
    if (first >= q_len) | (SKIP_SINGLE & (q_len == 1)):
        return
    kv_head = tl.program_id(1) // tl.cdiv(G, HEADS)
    m = tl.arange(0, BLOCK_M)
    query = first + m // HEADS
    member = (tl.program_id(1) % tl.cdiv(G, HEADS)) * HEADS + m % HEADS
    head = kv_head * G + member
    real = (m < QUERIES * HEADS) & (query < q_len) & (member < G)
    feature = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (feature < D)[None, :]
    token = start.to(tl.int64) + query
    place = q + (token * q_t + head * q_h)[:, None] + feature
    queries = tl.load(place, mask=inside, other=0.0)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    before = tl.load(seq_lens + row) - q_len  # positions cached before the row's first query
    end = before + tl.minimum(first + QUERIES, q_len)
    begin = before * 0
    common = (before + first + 1) // BLOCK_N * BLOCK_N  # keys that every query of the tile sees
    if WINDOW > 0:
        begin = tl.maximum(before + first - WINDOW + 1, 0)
        common = begin
    table = page_table + tl.load(req_slot + row) * table_r
    k_head, v_head = k_cache + kv_head * k_h, v_cache + kv_head * v_h
    if WINDOW == 0:
        most, total, mixed = _attend(
            queries, before + query, k_head, v_head, k_n, v_n, table, scale, begin, common, end,
            most, total, mixed, D, BLOCK_D, BLOCK_N, PAGE_SIZE, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    most, total, mixed = _attend(
        queries, before + query, k_head, v_head, k_n, v_n, table, scale, common, end, end,
        most, total, mixed, D, BLOCK_D, BLOCK_N, PAGE_SIZE, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        total, mixed = add_sink(sink, most, total, mixed)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + (token * H + head)[:, None] * D + feature
    tl.store(target, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _find(
    tile_id: tl.tensor,
    cu_seqlens_q: tl.tensor,
    rows: tl.tensor,
    QUERIES: tl.constexpr,
) -> tl.tensor:
    """(row, its first token, its queries, the tile's first query).

    Row r's tiles begin at cu_seqlens_q[r] // QUERIES + r: at least as far apart as the row needs,
    so the row is the last one that begins at or before the tile.
    """
    low = tile_id * 0
    high = rows + tile_id * 0
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // QUERIES + middle <= tile_id:
            low = middle
        else:
            high = middle
    start = tl.load(cu_seqlens_q + low)
    q_len = tl.load(cu_seqlens_q + low + 1) - start
    return low, start, q_len, (tile_id - start // QUERIES - low) * QUERIES


@triton.jit
def _attend(
    queries: tl.tensor,  # [M, BLOCK_D]
    position: tl.tensor,  # [M]
    k_head: tl.tensor,
    v_head: tl.tensor,
    k_n: tl.tensor,
    v_n: tl.tensor,
    table: tl.tensor,
    scale: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,  # keys from here on may not be read
    most: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # False: every query sees every key from begin to stop
) -> tl.tensor:
    """Adds the keys from begin to stop to the running softmax: (most, total, mixed)."""
    feature = tl.arange(0, BLOCK_D)
    for block in range(begin, stop, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        seen = key < end
        slots = slots_of(table, key, seen, PAGE_SIZE, MASKED)
        k = gather(k_head, k_n, slots, feature, seen, D, BLOCK_D, MASKED)
        scores = score(queries, k, scale, SOFTCAP)
        if MASKED:
            visible = seen[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                visible &= key[None, :] > position[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        v = gather(v_head, v_n, slots, feature, seen, D, BLOCK_D, MASKED)
        most, total, mixed = accumulate(scores, v, most, total, mixed, queries.dtype)
    return most, total, mixed
