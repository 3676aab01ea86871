"""Rotary position embedding of queries and keys in one launch.

Knows nothing of how the angles were scaled: callers bring the table of cosines and sines.

Axes: T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048  # of one program: heads times padded features


def apply_rope(
    q: Tensor,  # [T, H, D] may be a strided view
    k: Tensor,  # [T, K, D] may be a strided view
    positions: Tensor,  # [T] int32 or int64
    cos_sin: Tensor,  # [max_position, rotary_dim] fp32, cosines in the first half
    interleaved: bool,
    q_out: Tensor | None = None,  # [T, H, D] q's dtype, contiguous
    k_out: Tensor | None = None,  # [T, K, D] k's dtype, contiguous
) -> tuple[Tensor, Tensor]:
    """As `treadle.kernels.rope.apply_rope`."""
    tokens, q_heads, dim = q.shape
    kv_heads, rotary_dim = k.shape[1], cos_sin.shape[1]
    if q_out is None:
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if k_out is None:
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    assert q_out.is_contiguous() and k_out.is_contiguous()
    block = triton.next_power_of_2(rotary_dim // 2)
    heads = max(1, min(_ELEMENTS // (2 * block), triton.next_power_of_2(q_heads)))
    q_blocks = triton.cdiv(q_heads, heads)
    if tokens:
        rope_kernel[(tokens, q_blocks + triton.cdiv(kv_heads, heads))](
            q, k, positions.contiguous(), cos_sin.contiguous(), q_out, k_out,
            *q.stride(), *k.stride(),
            Q_HEADS=q_heads, KV_HEADS=kv_heads, D=dim, HALF=rotary_dim // 2,
            Q_BLOCKS=q_blocks, HEADS=heads, BLOCK=block,
            TAIL=triton.next_power_of_2(dim - rotary_dim), INTERLEAVED=interleaved, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    q_stride_t: tl.tensor,
    q_stride_h: tl.tensor,
    q_stride_d: tl.tensor,
    k_stride_t: tl.tensor,
    k_stride_h: tl.tensor,
    k_stride_d: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Grid: tokens, then blocks of query heads followed by blocks of kv heads."""
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK)[None, :]
    table = cos_sin + tl.load(positions + t).to(tl.int64) * (2 * HALF) + pair
    cos = tl.load(table, mask=pair < HALF, other=0.0)
    sin = tl.load(table + HALF, mask=pair < HALF, other=0.0)
    if block < Q_BLOCKS:
        _rotate(
            q + t * q_stride_t, q_out + t * (Q_HEADS * D), q_stride_h, q_stride_d,
            block * HEADS + tl.arange(0, HEADS)[:, None], pair, cos, sin,
            Q_HEADS, D, HALF, TAIL, INTERLEAVED,
        )  # fmt: skip
    else:
        _rotate(
            k + t * k_stride_t, k_out + t * (KV_HEADS * D), k_stride_h, k_stride_d,
            (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)[:, None], pair, cos, sin,
            KV_HEADS, D, HALF, TAIL, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def _rotate(
    x: tl.tensor,  # the token's heads
    out: tl.tensor,  # [N_HEADS, D]
    stride_h: tl.tensor,
    stride_d: tl.tensor,
    head: tl.tensor,  # [HEADS, 1]
    pair: tl.tensor,  # [1, BLOCK]
    cos: tl.tensor,
    sin: tl.tensor,
    N_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    first = pair
    second = pair + HALF
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    inside = (head < N_HEADS) & (pair < HALF)
    a = tl.load(x + head * stride_h + first * stride_d, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + head * stride_h + second * stride_d, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + head * D + first, (a * cos - b * sin).to(dtype), mask=inside)
    tl.store(out + head * D + second, (b * cos + a * sin).to(dtype), mask=inside)
    if 2 * HALF < D:
        feature = 2 * HALF + tl.arange(0, TAIL)[None, :]
        beyond = (head < N_HEADS) & (feature < D)
        kept = tl.load(x + head * stride_h + feature * stride_d, mask=beyond, other=0.0)
        tl.store(out + head * D + feature, kept, mask=beyond)
