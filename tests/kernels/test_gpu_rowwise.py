"""Triton's norms, rotation, activations and cache writes against the fp64 reference."""

from __future__ import annotations

import pytest
import torch

from treadle.kernels import reference

pytest.importorskip("triton")

from treadle.kernels.gpu import activation, kv_store, norm, rope  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 + 1e-4, torch.float16: 2**-10 + 1e-4}
SMALLEST = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 3e-7}  # fp16 is subnormal
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (33, 33), (5, 1), (3, 2048), (0, 64)])
def test_rms_norm_rows(
    gpu_device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = (torch.randn(shape) * torch.rand(shape[0], 1) * 10).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    out = norm.rms_norm(x.to(gpu_device), weight.to(gpu_device), 1e-5)
    assert out.dtype is dtype and out.is_contiguous()
    want = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(
        out.cpu().double(), want, rtol=TOLERANCE[dtype], atol=SMALLEST[dtype]
    )


@DTYPES
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 80), (5, 128)])
def test_rms_norm_heads_of_a_fused_projection(
    gpu_device: torch.device, dtype: torch.dtype, heads: int, dim: int
) -> None:
    fused = torch.randn(9, (heads + 4) * dim).to(dtype).to(gpu_device)
    x = fused[:, dim : dim + heads * dim].view(9, heads, dim)
    weight = torch.randn(dim).to(dtype)
    out = norm.rms_norm(x, weight.to(gpu_device), 1e-6)
    want = reference.rms_norm(x.cpu(), weight, 1e-6)
    assert out.is_contiguous()
    torch.testing.assert_close(
        out.cpu().double(), want, rtol=TOLERANCE[dtype], atol=SMALLEST[dtype]
    )


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (37, 48), (2, 3, 40)])
def test_add_rms_norm_adds_to_the_residual(
    gpu_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    stream = torch.cat([residual, residual]).to(gpu_device)
    changed = stream[: len(residual)]
    normed = norm.add_rms_norm(x.to(gpu_device), changed, weight.to(gpu_device), 1e-5)
    assert torch.equal(changed.cpu(), x + residual)
    assert torch.equal(stream[len(residual) :].cpu(), residual)
    want = reference.rms_norm(x + residual, weight, 1e-5)
    torch.testing.assert_close(
        normed.cpu().double(), want, rtol=TOLERANCE[dtype], atol=SMALLEST[dtype]
    )


@pytest.mark.parametrize("interleaved", [False, True])
@DTYPES
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "dim", "rotary_dim"),
    [(3, 9, 3, 64, 64), (5, 4, 1, 80, 32), (3, 3, 3, 10, 6), (2, 40, 8, 128, 128)],
)
def test_rope_rotates_views_of_a_fused_projection(
    gpu_device: torch.device,
    dtype: torch.dtype,
    interleaved: bool,
    tokens: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    rotary_dim: int,
) -> None:
    heads = torch.randn(tokens, q_heads + 2 * kv_heads, dim).to(dtype).to(gpu_device)
    q, k = heads[:, :q_heads], heads[:, q_heads : q_heads + kv_heads]
    positions = torch.randint(50, (tokens,), dtype=[torch.int32, torch.int64][tokens % 2])
    turns = torch.rand(50, rotary_dim // 2) * 7
    cos_sin = torch.cat([turns.cos(), turns.sin()], dim=-1)
    outs = rope.apply_rope(q, k, positions.to(gpu_device), cos_sin.to(gpu_device), interleaved)
    for out, x in zip(outs, (q, k), strict=True):
        assert out.dtype is dtype and out.is_contiguous()
        want = reference.rotate(x.cpu(), positions, cos_sin, interleaved)
        rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
        torch.testing.assert_close(out.cpu().double(), want, rtol=rtol, atol=3e-6)
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_rope_writes_into_given_outputs(gpu_device: torch.device) -> None:
    q, k = torch.randn(4, 6, 80, device=gpu_device), torch.randn(4, 2, 80, device=gpu_device)
    positions = torch.randint(9, (4,), device=gpu_device)
    turns = torch.rand(9, 16, device=gpu_device)
    cos_sin = torch.cat([turns.cos(), turns.sin()], dim=-1)
    want = rope.apply_rope(q, k, positions, cos_sin, False)
    buffers = [torch.full((6, *x.shape[1:]), float("nan"), device=gpu_device) for x in (q, k)]
    got = rope.apply_rope(q, k, positions, cos_sin, False, *[buffer[1:5] for buffer in buffers])
    for buffer, out, expected in zip(buffers, got, want, strict=True):
        assert out.data_ptr() == buffer[1:].data_ptr() and torch.equal(out, expected)
        assert buffer[0].isnan().all() and buffer[5].isnan().all()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (2, 3072), (0, 8)])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activation_matches(
    gpu_device: torch.device, dtype: torch.dtype, shape: tuple[int, int], name: str
) -> None:
    gate_up = (torch.randn(shape) * 4).to(dtype)
    out = getattr(activation, name)(gate_up.to(gpu_device))
    assert out.dtype is dtype
    want = getattr(reference, name)(gate_up)
    torch.testing.assert_close(out.cpu().double(), want, rtol=TOLERANCE[dtype], atol=1e-5)


def test_silu_and_mul_saturates_and_keeps_nan(gpu_device: torch.device) -> None:
    gate = torch.tensor([[-1e30, -200.0, -89.0, 87.5, 200.0, 1e30, float("nan")]])
    gate_up = torch.cat([gate, torch.ones(1, 7)], -1)
    out = activation.silu_and_mul(gate_up.to(gpu_device)).cpu()
    assert out[0, 6].isnan()
    torch.testing.assert_close(out[:, :6], gate[:, :6].clamp_min(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "kv_heads", "dim"), [(1, 3, 64), (20, 3, 80), (7, 1, 10)])
def test_store_kv_writes_only_its_slots(
    gpu_device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    tokens: int,
    kv_heads: int,
    dim: int,
) -> None:
    fused = torch.randn(tokens, 2 * kv_heads + 1, dim).to(dtype)
    k, v = fused[:, 1 : 1 + kv_heads], fused[:, 1 + kv_heads :]
    k_cache = torch.randn(100, kv_heads, dim).to(cache_dtype)
    v_cache = torch.randn(100, kv_heads, dim).to(cache_dtype)
    slots = torch.randperm(100)[:tokens]
    wanted = [reference.store_kv(k, k_cache, slots), reference.store_kv(v, v_cache, slots)]
    on_device = [x.to(gpu_device) for x in (k, v, k_cache, v_cache, slots)]
    kv_store.store_kv(*on_device)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device[2:4], wanted, strict=True))
