"""Rotary frequencies for every scaling variant, and the table of cosines and sines.

Knows neither checkpoints nor configs: a RopeSpec says everything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treadle.graphs.models.spec import (
    DivisorScaling,
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from treadle.kernels.rope import apply_rope


class Rotary:
    """Rotates queries and keys by their positions."""

    def __init__(self, rope: RopeSpec, max_position: int, device: torch.device) -> None:
        self.cos_sin = rotary_table(rope, max_position).to(device)  # [max_position, rotary_dim]
        self.interleaved = rope.interleaved

    def __call__(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, K, D]
        positions: Tensor,  # [T] int64
        q_out: Tensor | None = None,  # [T, H, D] written when given
    ) -> tuple[Tensor, Tensor]:
        return apply_rope(q, k, positions, self.cos_sin, self.interleaved, q_out)


def rotary_table(rope: RopeSpec, max_position: int) -> Tensor:
    """[max_position, rotary_dim] fp32: cosines in the first half, sines in the second."""
    inverse, amplitude = frequencies(rope, max_position)
    table = torch.empty(max_position, rope.rotary_dim)
    cos, sin = table.chunk(2, dim=-1)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse
    cos.copy_(angles.cos()).mul_(amplitude)
    sin.copy_(angles.sin()).mul_(amplitude)
    return table


def frequencies(rope: RopeSpec, max_position: int) -> tuple[Tensor, float]:
    """Radians per token ([rotary_dim / 2] fp32), and what cosines and sines are multiplied by.

    max_position: tokens of the served context; it matters to dynamic NTK and to longrope.
    """
    inverse = _inverse(rope.theta, rope.rotary_dim)
    match rope.scaling:
        case None:
            return inverse, 1.0
        case LinearScaling(factor):
            return inverse / factor, 1.0
        case DivisorScaling(divisors):
            return inverse / torch.tensor(divisors), 1.0
        case DynamicNtkScaling():
            theta = _dynamic_theta(rope.scaling, rope.theta, rope.rotary_dim, max_position)
            return _inverse(theta, rope.rotary_dim), 1.0
        case LongRopeScaling():
            beyond = max_position > rope.scaling.original_max_position
            divisors = rope.scaling.long_factor if beyond else rope.scaling.short_factor
            return inverse / torch.tensor(divisors), rope.scaling.attention_factor
        case Llama3Scaling():
            return _llama3(rope.scaling, inverse), 1.0
        case YarnScaling():
            ramp = _yarn_ramp(rope.scaling, rope.theta, rope.rotary_dim)
            scaled = inverse / rope.scaling.factor * ramp + inverse * (1 - ramp)
            return scaled, rope.scaling.attention_factor


def _inverse(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def _dynamic_theta(
    scaling: DynamicNtkScaling, theta: float, rotary_dim: int, max_position: int
) -> float:
    stretch = max(max_position / scaling.original_max_position, 1.0)
    growth = scaling.factor * stretch - (scaling.factor - 1)
    return float(theta * growth ** (rotary_dim / (rotary_dim - 2)))


def _llama3(scaling: Llama3Scaling, inverse: Tensor) -> Tensor:
    """Blends by how many turns a frequency makes over the trained length."""
    turns = scaling.original_max_position * inverse / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse / scaling.factor * (1 - keep) + inverse * keep


def _yarn_ramp(scaling: YarnScaling, theta: float, rotary_dim: int) -> Tensor:
    """[rotary_dim / 2]: 0 where a frequency is kept, 1 where it is interpolated."""

    def dimension(turns: float) -> float:
        length = scaling.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(length) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero, as everybody's yarn has it
    return ((torch.arange(rotary_dim // 2).float() - low) / (high - low)).clamp(0, 1)
