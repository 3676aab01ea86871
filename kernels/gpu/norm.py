"""Root-mean-square norm, alone and fused with the residual addition.

Knows nothing of models: callers say which weight and epsilon apply.

Axes: T tokens, H heads, D the normalised dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024  # of one program, where D is shorter: as many rows as fill it


def rms_norm(
    x: Tensor,  # [..., D] features contiguous
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [..., D] x's dtype, contiguous
    """As `treadle.kernels.rmsnorm.rms_norm`, in one pass."""
    dim = x.shape[-1]
    rows = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, dim).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, _ = rows.shape
    block, per_program, num_warps = _shape(dim)
    if out.numel():
        rms_norm_kernel[(triton.cdiv(tokens * heads, per_program),)](
            rows, weight, out, tokens * heads, heads, rows.stride(0), rows.stride(1), eps,
            D=dim, BLOCK=block, ROWS=per_program, num_warps=num_warps,
        )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor,  # [..., D]
    residual: Tensor,  # [..., D] x's dtype, contiguous, becomes x + residual
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [..., D] x's dtype, contiguous
    """As `treadle.kernels.rmsnorm.add_rms_norm`, in one pass."""
    assert residual.is_contiguous()
    x = x.contiguous()
    normed = torch.empty_like(x)
    dim = x.shape[-1]
    rows = x.numel() // dim
    block, per_program, num_warps = _shape(dim)
    if rows:
        add_rms_norm_kernel[(triton.cdiv(rows, per_program),)](
            x, residual, weight, normed, rows, eps,
            D=dim, BLOCK=block, ROWS=per_program, num_warps=num_warps,
        )  # fmt: skip
    return normed


def _shape(dim: int) -> tuple[int, int, int]:
    """Block of features, rows of a program, warps."""
    block = triton.next_power_of_2(dim)
    return block, max(1, _ELEMENTS // block), min(max(block // 512, 4), 16)


@triton.jit(do_not_specialize=["rows", "heads"])
def rms_norm_kernel(
    x: tl.tensor,  # [rows / heads, heads, D]
    weight: tl.tensor,  # [D]
    out: tl.tensor,  # [rows, D]
    rows: tl.tensor,
    heads: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    feature = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (feature < D)
    source = x + (row // heads) * stride_token + (row % heads) * stride_head + feature
    values = tl.load(source, mask=inside, other=0.0)
    normed = _normed(values, weight, feature, eps, D)
    tl.store(out + row * D + feature, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x: tl.tensor,  # [rows, D]
    residual: tl.tensor,  # [rows, D] written
    weight: tl.tensor,  # [D]
    normed: tl.tensor,  # [rows, D] written
    rows: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    feature = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (feature < D)
    place = row * D + feature
    added = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    total = added.to(residual.dtype.element_ty)
    tl.store(residual + place, total, mask=inside)
    out = _normed(total, weight, feature, eps, D)
    tl.store(normed + place, out.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _normed(
    values: tl.tensor,  # [ROWS, BLOCK] zero beyond D
    weight: tl.tensor,
    feature: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:  # fp32
    """Rounds the quotient to the values' dtype before the weight, as Llama does."""
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / D + eps)
    scaled = (wide * scale).to(values.dtype).to(tl.float32)
    return scaled * tl.load(weight + feature, mask=feature < D, other=0.0).to(tl.float32)
