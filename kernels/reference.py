"""The plain meaning of every kernel, in fp64 and in loops: what the tests compare with.

Knows nothing of speed, and shares no code with the kernels. Rounding to a dtype is left out: all
results are fp64.

Axes: T tokens, R rows, H query heads, K kv heads, D head dim, I intermediate size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = (x.double().unsqueeze(-2) * weight.double()).sum(-1)
    return product if bias is None else product + bias.double()


def rotate(
    x: Tensor,  # [T, H, D]
    positions: Tensor,  # [T]
    cos_sin: Tensor,  # [max_position, rotary_dim]
    interleaved: bool,
) -> Tensor:
    """Each pair of features as a complex number, turned by its angle."""
    out = x.double().clone()
    half = cos_sin.shape[1] // 2
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            turn = complex(cos_sin[position, i], cos_sin[position, i + half])
            turned = torch.complex(x[t, :, a].double(), x[t, :, b].double()) * turn
            out[t, :, a], out[t, :, b] = turned.real, turned.imag
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().tensor_split(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().tensor_split(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return gate / 2 * (1 + inner.tanh()) * up


def store_kv(values: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """The cache after the store: one of k and v."""
    stored = cache.clone()
    for t, slot in enumerate(slot_mapping.tolist()):
        stored[slot] = values[t].to(cache.dtype)
    return stored


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, K, D]
    v_cache: Tensor,  # [N, K, D]
    q_lens: list[int],  # [R]
    seq_lens: list[int],  # [R]
    page_table: Tensor,  # [R, P]
    page_size: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """One query at a time over the keys that it sees."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    token = 0
    for row, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        positions = torch.arange(seq_len)
        slots = page_table[row, positions // page_size].long() * page_size + positions % page_size
        for position in range(seq_len - q_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slots[first : position + 1]
            keys = k_cache[seen].double().repeat_interleave(group, dim=1)  # [seen, H, D]
            values = v_cache[seen].double().repeat_interleave(group, dim=1)
            weights = torch.softmax((keys * q[token].double()).sum(-1) * scale, dim=0)
            out[token] = (weights.unsqueeze(-1) * values).sum(0)
            token += 1
    return out
