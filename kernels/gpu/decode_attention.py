"""Attention of rows with one query: the keys of a row are split over programs, then combined.

Knows lengths only on the device: the number of splits follows from rows and heads, so a captured
launch serves any length.

Axes: T tokens, R rows, H query heads, K kv heads, G = H / K, D head dim, S splits.
Dao et al., Flash-Decoding for long-context inference, 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.kernels.gpu.attention_core import (
    INDICES,
    LOG2E,
    accumulate,
    add_sink,
    gather,
    score,
    slots_of,
)
from treadle.kernels.gpu.device import gpu_of
from treadle.kernels.paged_attention import AttentionMeta

_PROGRAMS_PER_PROCESSOR = 2
_MAX_SPLITS = 64
_MAX_HEADS = 32  # query heads of one program


def decode_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, K, D]
    v_cache: Tensor,  # [N, K, D]
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    sinks: Tensor | None,  # [H] fp32
    softcap: float | None,
    out: Tensor,  # [T, H, D] contiguous; written for rows of one query, left alone for others
    splits: int | None = None,
) -> None:
    """splits: parts of a row's keys; None takes as many as fill the device."""
    rows, (_, q_heads, dim), kv_heads = meta.seq_lens.shape[0], q.shape, k_cache.shape[1]
    group = q_heads // kv_heads
    heads = min(_MAX_HEADS, max(16, triton.next_power_of_2(group)))
    head_blocks = triton.cdiv(group, heads)
    splits = splits or num_splits(rows * kv_heads * head_blocks, q.device)
    parts = splits if splits > 1 else 0
    partial = torch.empty(rows, q_heads, parts, dim, dtype=torch.float32, device=q.device)
    weight = torch.empty(rows, q_heads, parts, dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(dim))
    sink = weight if sinks is None else sinks
    constants = dict(
        H=q_heads, D=dim, BLOCK_D=block_d, BLOCK_N=block_keys(block_d, q.dtype),
        WINDOW=window or 0, HAS_SINKS=sinks is not None,
    )  # fmt: skip
    assert q.stride(2) == k_cache.stride(2) == v_cache.stride(2) == 1 and out.is_contiguous()
    decode_kernel[(rows, kv_heads * head_blocks, splits)](
        q, k_cache, v_cache, sink, meta.cu_seqlens_q, meta.seq_lens, meta.req_slot,
        meta.page_table, out, partial, weight, scale, q.stride(0), q.stride(1),
        *k_cache.stride()[:2], *v_cache.stride()[:2], meta.page_table.stride(0),
        G=group, HEADS=heads, PAGE_SIZE=meta.page_size, SOFTCAP=softcap or 0.0,
        IS_SPLIT=splits > 1, **constants,
        num_warps=4, num_stages=2 if q.dtype is torch.float32 else 3,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows, q_heads)](
            partial, weight, sink, meta.cu_seqlens_q, meta.seq_lens, out, splits,
            **constants, num_warps=1 if block_d <= 64 else 2,
        )  # fmt: skip


def num_splits(programs: int, device: torch.device) -> int:
    """Parts of a row's keys, so that `programs` rows times head groups fill the device."""
    wanted = _PROGRAMS_PER_PROCESSOR * gpu_of(device).processors
    return min(_MAX_SPLITS, max(1, wanted // programs))


def block_keys(block_d: int, dtype: torch.dtype) -> int:
    if dtype is torch.float32:
        return 32 if block_d <= 64 else 16
    return 64 if block_d <= 128 else 32


@triton.jit(do_not_specialize=["table_r"], do_not_specialize_on_alignment=INDICES)
def decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    sinks: tl.tensor,  # [H]
    cu_seqlens_q: tl.tensor,  # [R + 1]
    seq_lens: tl.tensor,  # [R]
    req_slot: tl.tensor,  # [R]
    page_table: tl.tensor,  # [S, P]
    out: tl.tensor,  # [T, H, D]
    partial: tl.tensor,  # [R, H, S, D] written when split
    weight: tl.tensor,  # [R, H, S] written when split: log2 of the sum of weights
    scale: tl.tensor,
    q_t: tl.tensor, q_h: tl.tensor, k_n: tl.tensor, k_h: tl.tensor, v_n: tl.tensor,  # strides
    v_h: tl.tensor, table_r: tl.tensor,
    G: tl.constexpr, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Grid: rows, kv heads times blocks of their query heads, splits."""
    row, split = tl.program_id(0), tl.program_id(2)
    kv_head = tl.program_id(1) // tl.cdiv(G, HEADS)
    member = (tl.program_id(1) % tl.cdiv(G, HEADS)) * HEADS + tl.arange(0, HEADS)
    token = tl.load(cu_seqlens_q + row).to(tl.int64)
    if tl.load(cu_seqlens_q + row + 1) != token + 1:
        return
    begin, end = _span(tl.load(seq_lens + row), split, tl.num_programs(2), BLOCK_N, WINDOW)
    if IS_SPLIT and begin >= end:
        return
    feature = tl.arange(0, BLOCK_D)
    head = kv_head * G + member
    inside = (member < G)[:, None] & (feature < D)[None, :]
    queries = tl.load(q + token * q_t + head[:, None] * q_h + feature, mask=inside, other=0.0)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, BLOCK_D], tl.float32)
    table = page_table + tl.load(req_slot + row) * table_r
    k_head, v_head = k_cache + kv_head * k_h, v_cache + kv_head * v_h
    for block in range(begin, end, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        seen = key < end
        slots = slots_of(table, key, seen, PAGE_SIZE, True)
        k = gather(k_head, k_n, slots, feature, seen, D, BLOCK_D, True)
        scores = tl.where(seen[None, :], score(queries, k, scale, SOFTCAP), float("-inf"))
        v = gather(v_head, v_n, slots, feature, seen, D, BLOCK_D, True)
        most, total, mixed = accumulate(scores, v, most, total, mixed, q.dtype.element_ty)
    if IS_SPLIT:
        at = (row.to(tl.int64) * H + head) * tl.num_programs(2) + split
        tl.store(weight + at, most + tl.log2(total), mask=member < G)
        tl.store(partial + at[:, None] * D + feature, mixed / total[:, None], mask=inside)
        return
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=member < G, other=0.0).to(tl.float32)
        total, mixed = add_sink(sink, most, total, mixed)
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = out + (token * H + head)[:, None] * D + feature
    tl.store(place, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=INDICES)
def combine_kernel(
    partial: tl.tensor,  # [R, H, S, D]
    weight: tl.tensor,  # [R, H, S]
    sinks: tl.tensor,  # [H]
    cu_seqlens_q: tl.tensor,  # [R + 1]
    seq_lens: tl.tensor,  # [R]
    out: tl.tensor,  # [T, H, D] written
    splits: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Grid: rows, query heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_seqlens_q + row).to(tl.int64)
    if tl.load(cu_seqlens_q + row + 1) != token + 1:
        return
    seq_len = tl.load(seq_lens + row)
    feature = tl.arange(0, BLOCK_D)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        most = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    at = (row.to(tl.int64) * H + head) * splits
    for split in range(0, splits):
        begin, end = _span(seq_len, split, splits, BLOCK_N, WINDOW)
        if begin < end:
            part = tl.load(weight + at + split)
            values = tl.load(partial + (at + split) * D + feature, mask=feature < D, other=0.0)
            new_most = tl.maximum(most, part)
            fade, share = tl.exp2(most - new_most), tl.exp2(part - new_most)
            mixed = mixed * fade + values * share
            total = total * fade + share
            most = new_most
    mixed = mixed / tl.where(total == 0.0, 1.0, total)
    place = out + (token * H + head) * D + feature
    tl.store(place, mixed.to(out.dtype.element_ty), mask=feature < D)


@triton.jit
def _span(
    seq_len: tl.tensor,
    split: tl.tensor,
    splits: tl.tensor,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
) -> tl.tensor:
    """Keys of one split: (begin, end). Splits are whole blocks, the last ones may be empty."""
    first = seq_len * 0
    if WINDOW > 0:
        first = tl.maximum(seq_len - WINDOW, 0)
    length = tl.cdiv(tl.cdiv(seq_len - first, splits), BLOCK_N) * BLOCK_N
    begin = first + split * length
    return begin, tl.minimum(begin + length, seq_len)
