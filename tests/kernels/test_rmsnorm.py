"""Norms against the fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treadle.kernels import reference, rmsnorm

Implementation = Callable[..., Callable[..., Any]]

# bf16 rounds the quotient and the product: half a unit in the last place (2^-8) each.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 + 1e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (16, 576), (300, 576), (7, 33), (5, 1)])
def test_rms_norm_rows(
    implementation: Implementation, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = (torch.randn(shape) * torch.rand(shape[0], 1) * 10).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    out = implementation(rmsnorm, "rms_norm")(x, weight, 1e-5)
    want = reference.rms_norm(x, weight, 1e-5)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=1e-30)


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 80)])
def test_rms_norm_heads_of_a_fused_projection(
    implementation: Implementation, dtype: torch.dtype, heads: int, dim: int
) -> None:
    fused = torch.randn(9, (heads + 4) * dim).to(dtype)
    x = fused[:, dim : dim + heads * dim].view(9, heads, dim)
    weight = torch.randn(dim).to(dtype)
    out = implementation(rmsnorm, "rms_norm")(x, weight, 1e-6)
    want = reference.rms_norm(x, weight, 1e-6)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=1e-30)


def test_rms_norm_epsilon_rules_small_rows(implementation: Implementation) -> None:
    x = torch.randn(3, 64) * 1e-4
    out = implementation(rmsnorm, "rms_norm")(x, torch.ones(64), 1e-2)
    torch.testing.assert_close(out, x / 1e-2**0.5, rtol=1e-5, atol=0)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (16, 576), (200, 576), (2, 3, 40)])
def test_add_rms_norm_adds_to_the_residual(
    implementation: Implementation, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    before, total = x.clone(), x + residual
    normed = implementation(rmsnorm, "add_rms_norm")(x, residual, weight, 1e-5)
    assert normed.dtype is dtype
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    want = reference.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(normed.double(), want, rtol=TOLERANCE[dtype], atol=1e-30)


@DTYPES
def test_add_rms_norm_changes_only_its_rows(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    stream, weight = torch.randn(9, 48).to(dtype), torch.randn(48).to(dtype)
    before, x = stream.clone(), torch.randn(4, 48).to(dtype)
    implementation(rmsnorm, "add_rms_norm")(x, stream[2:6], weight, 1e-5)
    assert torch.equal(stream[2:6], before[2:6] + x)
    assert torch.equal(stream[:2], before[:2]) and torch.equal(stream[6:], before[6:])


@DTYPES
def test_norms_replay_with_other_numbers(played: Callable[..., Any], dtype: torch.dtype) -> None:
    fused, weight = torch.randn(9, 7 * 80).to(dtype), torch.randn(80).to(dtype)
    heads, rows = fused[:, 80:240].view(9, 2, 80), fused[:, 240:320]
    x, residual = torch.randn(2, 9, 80).to(dtype)
    fresh = torch.randn(2, 9, 80).to(dtype)

    def norms() -> list[torch.Tensor]:
        return [
            rmsnorm.rms_norm(heads, weight, 1e-5),
            rmsnorm.rms_norm(rows, weight, 1e-5),
            rmsnorm.add_rms_norm(x, residual, weight, 1e-5),
        ]

    def change() -> None:
        fused.copy_(torch.randn(fused.shape))
        x.copy_(fresh[0])
        residual.copy_(fresh[1])

    got = played(norms, change)
    total = residual.clone()
    residual.copy_(fresh[1])
    want = norms()
    assert torch.equal(residual, total)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@DTYPES
def test_rms_norm_strided_features_still_right(dtype: torch.dtype) -> None:
    x = torch.randn(64, 5).to(dtype).T
    weight = torch.randn(64).to(dtype)
    out = rmsnorm.rms_norm(x, weight, 1e-5)
    want = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=1e-30)


@pytest.mark.parametrize("shape", [(48,), (2, 3, 4, 48)])
def test_rms_norm_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(48)
    out = rmsnorm.rms_norm(x, weight, 1e-5)
    want = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=1e-30)
