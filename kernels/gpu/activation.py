"""Gated activations of the feed-forward block.

Knows nothing of the projections around them.

Axes: T tokens, I intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_and_mul(
    gate_up: Tensor,  # [T, 2I] the gate in the first half
) -> Tensor:  # [T, I]
    """silu(gate) * up."""
    return _launch(gate_up, is_gelu=False)


def gelu_tanh_and_mul(
    gate_up: Tensor,  # [T, 2I] the gate in the first half
) -> Tensor:  # [T, I]
    """gelu(gate) * up, with the tanh approximation of gelu."""
    return _launch(gate_up, is_gelu=True)


def _launch(gate_up: Tensor, is_gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        gated_kernel[(out.numel() // width, triton.cdiv(width, block))](
            gate_up, out, width, GELU=is_gelu, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def gated_kernel(
    gate_up: tl.tensor,  # [T, 2I]
    out: tl.tensor,  # [T, I]
    width: tl.tensor,  # I
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    row = gate_up + t * 2 * width + i
    stored = tl.load(row, mask=inside, other=0.0)
    gate = stored.to(tl.float32)
    up = tl.load(row + width, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(inner)
    else:
        activated = gate * tl.sigmoid(gate)
    activated = activated.to(stored.dtype).to(tl.float32)  # rounded as torch's own operator does
    tl.store(out + t * width + i, (activated * up).to(stored.dtype), mask=inside)
