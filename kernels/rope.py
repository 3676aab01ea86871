"""Rotary position embedding of queries and keys.

Knows nothing of how the angles were scaled: callers bring the finished table of cosines and sines.

Axes: T tokens, H query heads, K kv heads, D head dim. Su et al., RoFormer, 2021, section 3.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels import gpu, host

_rope = host.function(
    "treadle_rope",
    [host.INT, *[host.POINTER] * 6, *[host.SIZE] * 7, host.INT],
)


def apply_rope(
    q: Tensor,  # [T, H, D] may be a strided view
    k: Tensor,  # [T, K, D] may be a strided view
    positions: Tensor,  # [T] int64, contiguous
    cos_sin: Tensor,  # [max_position, rotary_dim] fp32, cosines in the first half
    interleaved: bool,
    q_out: Tensor | None = None,  # [T, H, D] q's dtype, contiguous
    k_out: Tensor | None = None,  # [T, K, D] k's dtype, contiguous
) -> tuple[Tensor, Tensor]:
    """Rotates the first rotary_dim of D in fp32; returns (q_out, k_out), new where not given.

    interleaved: pairs are neighbours (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    """
    if gpu.serves(q):
        from treadle.kernels.gpu import rope

        return rope.apply_rope(q, k, positions, cos_sin, interleaved, q_out, k_out)
    kind = host.kind(q)
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    q_stride, *q_inner = q.stride()
    k_stride, *k_inner = k.stride()
    is_dense = q_inner == [dim, 1] and k_inner == [dim, 1] and cos_sin.is_contiguous()
    if _rope is None or kind is None or not is_dense or k.dtype is not q.dtype:
        return apply_rope_torch(q, k, positions, cos_sin, interleaved, q_out, k_out)
    q_out = host.empty_like(q) if q_out is None else q_out
    k_out = host.empty_like(k) if k_out is None else k_out
    assert positions.dtype is torch.int64 and positions.is_contiguous()
    assert q_out.is_contiguous() and k_out.is_contiguous()
    _rope(
        kind,
        q.data_ptr(),
        k.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        q_out.data_ptr(),
        k_out.data_ptr(),
        tokens,
        q_heads,
        kv_heads,
        dim,
        cos_sin.shape[1],
        q_stride,
        k_stride,
        interleaved,
    )
    return q_out, k_out


def apply_rope_torch(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, interleaved, q_out), _rotate(k, cos, sin, interleaved, k_out)


def _rotate(
    x: Tensor,  # [T, H, D]
    cos: Tensor,  # [T, 1, rotary_dim / 2]
    sin: Tensor,  # [T, 1, rotary_dim / 2]
    interleaved: bool,
    out: Tensor | None,
) -> Tensor:
    half = cos.shape[-1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first].float(), x[..., second].float()
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    out.copy_(x)
    out[..., first] = (a * cos - b * sin).to(x.dtype)
    out[..., second] = (b * cos + a * sin).to(x.dtype)
    return out
