"""Gated activations of the feed-forward block.

Knows nothing of the projections around them.

Axes: T tokens, I intermediate size. Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import gpu, host

_silu_and_mul = host.function(
    "treadle_silu_and_mul",
    [host.INT, *[host.POINTER] * 2, *[host.SIZE] * 2],
)


def silu_and_mul(
    gate_up: Tensor,  # [T, 2I] the gate in the first half
) -> Tensor:  # [T, I]
    """silu(gate) * up."""
    if gpu.serves(gate_up):
        from treadle.kernels.gpu import activation

        return activation.silu_and_mul(gate_up)
    kind = host.kind(gate_up)
    if _silu_and_mul is None or kind is None or not gate_up.is_contiguous():
        return silu_and_mul_torch(gate_up)
    tokens, width = gate_up.shape
    out = gate_up.new_empty(tokens, width // 2)
    _silu_and_mul(kind, gate_up.data_ptr(), out.data_ptr(), tokens, width // 2)
    return out


def gelu_tanh_and_mul(
    gate_up: Tensor,  # [T, 2I] the gate in the first half
) -> Tensor:  # [T, I]
    """gelu(gate) * up, with the tanh approximation of gelu."""
    if gpu.serves(gate_up):
        from treadle.kernels.gpu import activation

        return activation.gelu_tanh_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def silu_and_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
