"""From logits to tokens, on the device and without a host sync.

Knows rows of logits only. Random numbers are keyed by (seed, position), so a row's token depends
on nothing but its own logits, seed and length.

Axes: N rows that sample, V vocabulary.
"""

from __future__ import annotations

import torch

from treadle.kernels import gpu

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit number
_MIX_1 = -0x40A7B892E31B1A47  # splitmix64's multipliers (Steele, Lea, Flood 2014), signed
_MIX_2 = -0x6B2FB644ECCEEE15


def sample(
    logits: torch.Tensor,  # [N, V] float32; overwritten when masked
    temperature: torch.Tensor | None,  # [N] float32, None when every row is greedy
    seeds: torch.Tensor,  # [N] int64
    positions: torch.Tensor,  # [N] int64 length of the row, the new token excluded
    mask: torch.Tensor | None = None,  # [N, V] bool, True where allowed
) -> torch.Tensor:
    """One token per row, [N] int64: the likeliest where temperature is 0, else a draw.

    A draw inverts the cumulative distribution at one uniform number per row. Ties of the likeliest
    go to the lowest id.
    """
    if mask is not None:
        logits = logits.masked_fill_(~mask, -torch.inf)
    if gpu.serves(logits):
        from treadle.kernels.gpu import sampling

        return sampling.sample(logits, temperature, seeds, positions)
    likeliest = logits.argmax(dim=-1)
    if temperature is None:
        return likeliest
    is_greedy = temperature <= 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature).unsqueeze(1)
    cumulative = torch.softmax(scaled, dim=-1).cumsum_(dim=-1)
    target = uniform(seeds, positions).unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # rounding can put the target at the very end; the likeliest token always has a chance
    drawn = torch.where(drawn < logits.shape[1], drawn, likeliest)
    return torch.where(is_greedy, likeliest, drawn)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[N] float32 in [0, 1) from two rounds of splitmix64 over (seed, position)."""
    mixed = _mix(_mix(seeds) + positions * _GOLDEN)
    return ((mixed >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = value + _GOLDEN
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)
