"""Rotary embedding against complex multiplication in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treadle.kernels import reference, rope

Implementation = Callable[..., Callable[..., Any]]

# The output is rounded once: half a unit in the last place, relative to the larger of a pair.
TOLERANCE = {torch.float32: (1e-6, 2e-6), torch.bfloat16: (2**-8, 1e-6)}


def angles(max_position: int, rotary_dim: int) -> torch.Tensor:
    turns = torch.rand(max_position, rotary_dim // 2) * 7
    return torch.cat([turns.cos(), turns.sin()], dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "dim", "rotary_dim"),
    [(1, 9, 3, 64, 64), (130, 9, 3, 64, 64), (5, 4, 1, 80, 32), (3, 3, 3, 10, 6)],
)
def test_rope_rotates_views_of_a_fused_projection(
    implementation: Implementation,
    dtype: torch.dtype,
    interleaved: bool,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    rotary_dim: int,
) -> None:
    fused = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim).to(dtype)
    heads = fused.view(tokens, q_heads + 2 * kv_heads, dim)
    q, k = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads]
    before = fused.clone()
    positions = torch.randint(50, (tokens,))
    cos_sin = angles(50, rotary_dim)
    apply_rope = implementation(rope, "apply_rope")
    q_out, k_out = apply_rope(q, k, positions, cos_sin, interleaved)
    assert torch.equal(fused, before)
    rtol, atol = TOLERANCE[dtype]
    for out, x in ((q_out, q), (k_out, k)):
        assert out.dtype is dtype and out.is_contiguous()
        want = reference.rotate(x, positions, cos_sin, interleaved)
        torch.testing.assert_close(out.double(), want, rtol=rtol, atol=atol)
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_rope_takes_int32_positions(implementation: Implementation) -> None:
    q, k, cos_sin = torch.randn(4, 2, 32), torch.randn(4, 2, 32), angles(9, 32)
    positions = torch.tensor([8, 0, 3, 3])
    apply_rope = implementation(rope, "apply_rope")
    narrow = apply_rope(q, k, positions.int(), cos_sin, False)
    wide = apply_rope(q, k, positions, cos_sin, False)
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
