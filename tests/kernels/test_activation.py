"""Gated activations against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treadle.kernels import activation, reference

Implementation = Callable[..., Callable[..., Any]]

# bf16 rounds the activated gate and the product: half a unit in the last place (2^-8) each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 + 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (16, 3072), (90, 3072)])
def test_silu_and_mul_matches(
    implementation: Implementation, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    gate_up = (torch.randn(shape) * 8).to(dtype)
    out = implementation(activation, "silu_and_mul")(gate_up)
    assert out.dtype is dtype
    want = reference.silu_and_mul(gate_up)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=1e-6)


def test_silu_and_mul_saturates_without_nan(implementation: Implementation) -> None:
    gate = torch.tensor([[-1e30, -200.0, -89.0, -87.5, 87.5, 89.0, 200.0, 1e30]])
    out = implementation(activation, "silu_and_mul")(torch.cat([gate, torch.ones(1, 8)], -1))
    torch.testing.assert_close(out, gate.clamp_min(0), rtol=1e-6, atol=1e-6)


def test_silu_and_mul_keeps_nan(implementation: Implementation) -> None:
    gate_up = torch.randn(2, 64)
    gate_up[1, 3] = float("nan")
    out = implementation(activation, "silu_and_mul")(gate_up)
    assert out.isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (5, 98), (16, 3072), (90, 3072)])
def test_gelu_tanh_and_mul_matches(
    implementation: Implementation, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    gate_up = (torch.randn(shape) * 4).to(dtype)
    want = reference.gelu_tanh_and_mul(gate_up)
    out = implementation(activation, "gelu_tanh_and_mul")(gate_up)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=4e-6)


def test_gelu_tanh_and_mul_saturates_and_keeps_nan(implementation: Implementation) -> None:
    gate = torch.tensor([[-1e30, -200.0, -10.0, 10.0, 200.0, 1e30, float("nan")]])
    out = implementation(activation, "gelu_tanh_and_mul")(torch.cat([gate, torch.ones(1, 7)], -1))
    torch.testing.assert_close(out[:, :6], gate[:, :6].clamp_min(0), rtol=1e-6, atol=1e-6)
    assert out[0, 6].isnan()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_take_rows_of_a_wider_tensor(
    implementation: Implementation, dtype: torch.dtype, name: str
) -> None:
    gate_up = torch.randn(7, 120).to(dtype)[1:, 3:99]
    out = implementation(activation, name)(gate_up)
    assert out.is_contiguous()
    want = getattr(reference, name)(gate_up)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=4e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_replay_with_other_numbers(
    played: Callable[..., Any], dtype: torch.dtype, name: str
) -> None:
    wide = torch.randn(7, 120).to(dtype)
    strided, dense = wide[1:, 3:99], torch.randn(4, 64).to(dtype)
    gate = getattr(activation, name)

    def change() -> None:
        wide.copy_(torch.randn(wide.shape))
        dense.copy_(torch.randn(dense.shape))

    got = played(lambda: (gate(strided), gate(dense)), change)
    assert torch.equal(got[0], gate(strided)) and torch.equal(got[1], gate(dense))
