"""Linear layers against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from treadle.kernels import host, linear, reference

# Sums in fp32; the result is rounded once: half a unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8 + 1e-4}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    if host.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    monkeypatch.setattr(F, "linear", lambda *_: pytest.fail("torch ran instead"))


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    out = linear.linear(x, weight, bias)
    want = reference.linear(x, weight, bias)
    assert out.dtype is x.dtype and out.is_contiguous()
    atol = 1e-7 * x.shape[-1]  # a rounding of a term of size one at each addition
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[x.dtype], atol=atol)


@DTYPES
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 16, 61, 64])
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (576, 208), (1536, 48)])
@pytest.mark.usefixtures("compiled_only")
def test_linear_matches(
    dtype: torch.dtype, has_bias: bool, tokens: int, inputs: int, outputs: int
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    check(torch.randn(tokens, inputs).to(dtype), weight, bias)


@pytest.mark.usefixtures("compiled_only")
def test_linear_many_tokens_pass_in_blocks() -> None:
    check(torch.randn(301, 4096), torch.randn(32, 4096), torch.randn(32))


@DTYPES
@pytest.mark.usefixtures("compiled_only")
def test_linear_takes_strided_rows(dtype: torch.dtype) -> None:
    x = torch.randn(9, 3, 64).to(dtype)[:, 1]
    check(x, torch.randn(16, 64).to(dtype), None)


@DTYPES
@pytest.mark.usefixtures("compiled_only")
def test_linear_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, weight = torch.randn(23, 96).to(dtype), torch.randn(32, 96).to(dtype)
    together = linear.linear(x, weight)
    alone = torch.cat([linear.linear(x[t : t + 1], weight) for t in range(len(x))])
    assert torch.equal(together, alone)


@DTYPES
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"),
    [((3,), 33, 16), ((3,), 64, 15), ((2, 5), 64, 16), ((), 64, 16)],
)
def test_linear_any_shape_through_torch(
    dtype: torch.dtype, tokens: tuple[int, ...], inputs: int, outputs: int
) -> None:
    x = torch.randn(*tokens, inputs).to(dtype)
    check(x, torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype))
