"""Root-mean-square normalisation, alone and fused with the residual addition.

Knows nothing of models: callers say which weight and epsilon apply.

Axes: D the normalised dimension. Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels import gpu, host

_rms_norm = host.function(
    "treadle_rms_norm",
    [host.INT, *[host.POINTER] * 3, *[host.SIZE] * 4, host.FLOAT],
)
_add_rms_norm = host.function(
    "treadle_add_rms_norm",
    [host.INT, *[host.POINTER] * 4, *[host.SIZE] * 2, host.FLOAT],
)


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D] x's dtype
    eps: float,
) -> Tensor:  # [..., D] x's dtype
    """Divides by the root mean square over D, taken in fp32, then multiplies by the weight.

    The quotient is rounded to x's dtype before the multiplication, as Llama does.
    """
    if gpu.serves(x):
        from treadle.kernels.gpu import norm

        return norm.rms_norm(x, weight, eps)
    kind = host.kind(x)
    *leading, dim = x.shape
    stride, *inner = x.stride()
    is_dense = inner == [1] or inner == [dim, 1]
    if _rms_norm is None or kind is None or not is_dense or weight.dtype is not x.dtype:
        return rms_norm_torch(x, weight, eps)
    out = host.empty_like(x)
    _rms_norm(
        kind,
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        leading[0],
        leading[1] if len(leading) == 2 else 1,
        dim,
        stride,
        eps,
    )
    return out


def add_rms_norm(
    x: Tensor,  # [..., D]
    residual: Tensor,  # [..., D] x's dtype, becomes x + residual
    weight: Tensor,  # [D] x's dtype
    eps: float,
) -> Tensor:  # [..., D] x's dtype
    """The norm of `x + residual`, a sum that the residual keeps, rounded to its dtype."""
    if gpu.serves(x):
        from treadle.kernels.gpu import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    kind = host.kind(x)
    is_dense = x.is_contiguous() and residual.is_contiguous()
    is_uniform = residual.dtype is x.dtype and weight.dtype is x.dtype
    if _add_rms_norm is None or kind is None or not is_dense or not is_uniform:
        return add_rms_norm_torch(x, residual, weight, eps)
    normed = host.empty_like(x)
    dim = x.shape[-1]
    _add_rms_norm(
        kind,
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        normed.data_ptr(),
        x.numel() // dim,
        dim,
        eps,
    )
    return normed


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.add_(x)
    return rms_norm_torch(residual, weight, eps)
