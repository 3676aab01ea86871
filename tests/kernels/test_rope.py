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


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rope_writes_into_given_outputs(
    implementation: Implementation, dtype: torch.dtype, interleaved: bool
) -> None:
    q, k = torch.randn(4, 6, 80).to(dtype), torch.randn(4, 2, 80).to(dtype)
    positions, cos_sin = torch.randint(9, (4,)), angles(9, 32)
    apply_rope = implementation(rope, "apply_rope")
    want_q, want_k = apply_rope(q, k, positions, cos_sin, interleaved)
    q_out, k_out = torch.empty(6, 6, 80, dtype=dtype), torch.empty(6, 2, 80, dtype=dtype)
    outs = (q_out[1:5], k_out[1:5])
    got = apply_rope(q, k, positions, cos_sin, interleaved, *outs)
    assert got[0] is outs[0] and got[1] is outs[1]
    assert torch.equal(q_out[1:5], want_q) and torch.equal(k_out[1:5], want_k)
    for out in (q_out, k_out):
        assert out[0].isnan().all() and out[5].isnan().all()
    only_k = apply_rope(q, k, positions, cos_sin, interleaved, k_out=k_out[1:5])
    assert torch.equal(only_k[0], want_q)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_given", [False, True])
def test_rope_replays_at_other_positions(
    played: Callable[..., Any], dtype: torch.dtype, is_given: bool
) -> None:
    fused, positions = torch.randn(5, 10, 64).to(dtype), torch.zeros(5, dtype=torch.int64)
    q, k, cos_sin = fused[:, 1:7], fused[:, 7:9], angles(50, 64)
    outs = (torch.empty(5, 6, 64, dtype=dtype), torch.empty(5, 2, 64, dtype=dtype))

    def change() -> None:
        fused.copy_(torch.randn(fused.shape))
        positions.random_(50)

    got = played(
        lambda: rope.apply_rope(q, k, positions, cos_sin, False, *(outs if is_given else ())),
        change,
    )
    want = rope.apply_rope(q, k, positions, cos_sin, False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("positions", [torch.tensor([1, 2]).int(), torch.tensor([1, 0, 2])[::2]])
def test_rope_compiled_refuses_positions_that_it_cannot_read(
    played: Callable[..., Any], positions: torch.Tensor
) -> None:
    q = torch.randn(2, 3, 32)
    with pytest.raises(AssertionError):
        rope.apply_rope(q, q, positions, angles(9, 32), False)
