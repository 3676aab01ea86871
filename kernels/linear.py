"""The linear layer over plain weights.

Knows nothing of what is projected, nor of quantized weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import host

_linear = host.function(
    "treadle_linear",
    [host.INT, *[host.POINTER] * 4, *[host.SIZE] * 4],
)
# On two Zen 5 cores ours is ahead of MKL at any size in fp32, of oneDNN up to here in bf16.
_MOST_TOKENS = {torch.float32: 1 << 62, torch.bfloat16: 64}


def linear(
    x: Tensor,  # [..., in]
    weight: Tensor,  # [out, in] x's dtype
    bias: Tensor | None = None,  # [out] x's dtype
    out: Tensor | None = None,  # [T, out] contiguous; x is [T, in] then
) -> Tensor:  # [..., out]
    """x W^T + b, summed in fp32 and rounded once to x's dtype."""
    kind = host.kind(x)
    *tokens, inputs = x.shape
    outputs = weight.shape[0]
    if (
        _linear is None
        or kind is None
        or len(tokens) != 1
        or tokens[0] > _MOST_TOKENS[x.dtype]
        or inputs % 32
        or outputs % 16
        or x.stride(1) != 1
        or weight.dtype is not x.dtype
        or not weight.is_contiguous()
    ):
        return _linear_torch(x, weight, bias, out)
    if out is None:
        out = host.empty((tokens[0], outputs), x.dtype)
    _linear(
        kind,
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        tokens[0],
        inputs,
        outputs,
        x.stride(0),
    )
    return out


def _linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    if x.ndim != 2:
        return F.linear(x, weight, bias)
    if out is None:
        out = host.empty((len(x), len(weight)), x.dtype, x.device)
    if bias is None:
        host.call(torch.mm, x, weight.t(), out=out)
    else:
        host.call(torch.addmm, bias, x, weight.t(), out=out)
    return out
