"""Gated activations of the feed-forward block.

Knows nothing of the projections around them.

Axes: T tokens, I intermediate size. Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import gpu, host

_ARGUMENTS = [host.INT, *[host.POINTER] * 2, *[host.SIZE] * 3]
_silu_and_mul = host.function("treadle_silu_and_mul", _ARGUMENTS)
_gelu_tanh_and_mul = host.function("treadle_gelu_tanh_and_mul", _ARGUMENTS)


def silu_and_mul(
    gate_up: Tensor,  # [T, 2I] the gate in the first half
) -> Tensor:  # [T, I]
    """silu(gate) * up."""
    if gpu.serves(gate_up):
        from treadle.kernels.gpu import activation

        return activation.silu_and_mul(gate_up)
    if _silu_and_mul is None or not _is_compiled_for(gate_up):
        return silu_and_mul_torch(gate_up)
    return _gate(_silu_and_mul, gate_up)


def gelu_tanh_and_mul(
    gate_up: Tensor,  # [T, 2I] the gate in the first half
) -> Tensor:  # [T, I]
    """gelu(gate) * up, with the tanh approximation of gelu."""
    if gpu.serves(gate_up):
        from treadle.kernels.gpu import activation

        return activation.gelu_tanh_and_mul(gate_up)
    if _gelu_tanh_and_mul is None or not _is_compiled_for(gate_up):
        return gelu_tanh_and_mul_torch(gate_up)
    return _gate(_gelu_tanh_and_mul, gate_up)


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _is_compiled_for(gate_up: Tensor) -> bool:
    return host.kind(gate_up) is not None and gate_up.stride(1) == 1


def _gate(kernel: Callable[..., None], gate_up: Tensor) -> Tensor:
    tokens, width = gate_up.shape
    out = host.empty((tokens, width // 2), gate_up.dtype)
    kernel(
        host.kind(gate_up),
        gate_up.data_ptr(),
        out.data_ptr(),
        tokens,
        width // 2,
        gate_up.stride(0),
    )
    return out
