"""Cases of the kernels that go over rows: norms, rotation, activations, cache writes.

Knows kernels and their references. Axes: T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from treadle.kernels import activation, kv_store, reference, rmsnorm, rope
from treadle.perf.gpu.sections import Setting

BF16 = 2**-7 + 1e-4  # two roundings to nearest
_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Timed:
    """A call of serving size, and torch's way to the same result."""

    call: Callable[[], Tensor]
    num_bytes: float = 0.0  # that must be moved at least
    flops: float = 0.0
    rival: Callable[[], Tensor] | None = None
    tolerance: float = 2 * BF16
    floor: float | None = 1.0

    def error(self) -> float:
        """In units of the tolerance."""
        assert self.rival is not None
        got = self.call().clone()  # both may write to one place
        return error_of(got, self.rival(), self.tolerance, self.floor)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    error: Callable[[], float]  # on a small input, in units of the tolerance
    timed: Callable[[], Timed]


def error_of(got: Tensor, want: Tensor, tolerance: float, floor: float | None = 1.0) -> float:
    """The largest difference, in units of the tolerance times (floor + what is wanted).

    floor: None for the largest that is wanted. NaN shows.
    """
    got, want = got.double(), want.to(got.device).double()
    size = want.abs()
    allowed = tolerance * (size.max() if floor is None else floor + size)
    return float(((got - want).abs() / allowed).max())


def rowwise_cases(setting: Setting) -> list[Case]:
    from treadle.kernels.gpu import norm

    device, tokens = setting.device, 8 if setting.is_tiny else 16_384
    hidden = 64 if setting.is_tiny else 4096
    randn = partial(_randn, device)

    def norm_error() -> float:
        x, weight = randn(33, 576), randn(576)
        return error_of(
            norm.rms_norm(x, weight, _EPS), reference.rms_norm(x.cpu(), weight.cpu(), _EPS), BF16
        )

    def norm_timed() -> Timed:
        x, weight = randn(tokens, hidden), randn(hidden)
        rival = partial(rmsnorm.rms_norm_torch, x, weight, _EPS)
        return Timed(partial(norm.rms_norm, x, weight, _EPS), 2.0 * x.nbytes, 0.0, rival)

    def add_error() -> float:
        x, residual, weight = randn(33, 576), randn(33, 576), randn(576)
        want = reference.rms_norm((x + residual).cpu(), weight.cpu(), _EPS)
        return error_of(norm.add_rms_norm(x, residual, weight, _EPS), want, BF16)

    def add_timed() -> Timed:
        x, residual, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
        return Timed(partial(norm.add_rms_norm, x, residual, weight, _EPS), 4.0 * x.nbytes)

    def heads_error() -> float:
        x, weight = randn(9, 7, 128)[:, 1:6], randn(128)
        want = reference.rms_norm(x.cpu(), weight.cpu(), _EPS)
        return error_of(norm.rms_norm(x, weight, _EPS), want, BF16)

    def heads_timed() -> Timed:
        x, weight = randn(tokens, 24, 128)[:, :16], randn(128)
        return Timed(partial(norm.rms_norm, x, weight, _EPS), 4.0 * x.numel())

    return [
        Case("rms_norm", norm_error, norm_timed),
        Case("add_rms_norm", add_error, add_timed),
        Case("rms_norm of heads", heads_error, heads_timed),
        _rope_case(setting),
        _gate_case("silu_and_mul", setting),
        _gate_case("gelu_tanh_and_mul", setting),
        _store_case(setting),
    ]


def _rope_case(setting: Setting) -> Case:
    from treadle.kernels.gpu import rope as kernel

    device, randn = setting.device, partial(_randn, setting.device)

    def inputs(tokens: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        fused = randn(tokens, heads + 4, 128)
        positions = torch.randint(0, 500, (tokens,), device=device)
        angles = torch.rand(500, 64, device=device) * 6.28
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        return fused[:, :heads], fused[:, heads : heads + 2], positions, table

    def error() -> float:
        q, k, positions, table = inputs(9, 6)
        got = kernel.apply_rope(q, k, positions, table, False)
        wants = [
            reference.rotate(x.cpu(), positions.cpu(), table.cpu(), False) for x in (q, k)
        ]  # fmt: skip
        return max(error_of(x, want, BF16) for x, want in zip(got, wants, strict=True))

    def timed() -> Timed:
        q, k, positions, table = inputs(8 if setting.is_tiny else 16_384, 32)
        moved = 4.0 * (q.numel() + k.numel())
        call = partial(kernel.apply_rope, q, k, positions, table, False)
        rival = partial(rope.apply_rope_torch, q, k, positions, table, False)
        return Timed(lambda: call()[0], moved, 0.0, lambda: rival()[0])

    return Case("apply_rope", error, timed)


def _gate_case(name: str, setting: Setting) -> Case:
    from treadle.kernels.gpu import activation as kernel

    randn = partial(_randn, setting.device)
    call: Callable[[Tensor], Tensor] = getattr(kernel, name)
    plain: Callable[[Tensor], Tensor] = getattr(activation, f"{name}_torch")
    want: Callable[[Tensor], Tensor] = getattr(reference, name)

    def error() -> float:
        x = randn(5, 1234)
        return error_of(call(x), want(x.cpu()), 2 * BF16)

    def timed() -> Timed:
        x = randn(8, 64) if setting.is_tiny else randn(16_384, 2 * 14_336)
        return Timed(partial(call, x), 1.5 * x.nbytes, 0.0, partial(plain, x))

    return Case(name, error, timed)


def _store_case(setting: Setting) -> Case:
    from treadle.kernels.gpu import kv_store as kernel

    device, randn = setting.device, partial(_randn, setting.device)

    def inputs(tokens: int, slots: int) -> tuple[Tensor, ...]:
        fused = randn(tokens, 20, 128)
        places = torch.randperm(slots, device=device)[:tokens]
        return fused[:, 2:10], fused[:, 10:18], randn(slots, 8, 128), randn(slots, 8, 128), places

    def error() -> float:
        k, v, k_cache, v_cache, places = inputs(20, 70)
        wants = [
            reference.store_kv(x.cpu(), cache.cpu(), places.cpu())
            for x, cache in ((k, k_cache), (v, v_cache))
        ]
        kernel.store_kv(k, v, k_cache, v_cache, places)
        same = all(torch.equal(x.cpu(), w) for x, w in zip((k_cache, v_cache), wants, strict=True))
        return 0.0 if same else float("inf")

    def timed() -> Timed:
        k, v, k_cache, v_cache, places = inputs(*((8, 16) if setting.is_tiny else (32_768, 65_536)))

        def stored(store: Callable[..., None]) -> Tensor:
            store(k, v, k_cache, v_cache, places)
            return k_cache

        return Timed(
            partial(stored, kernel.store_kv), 8.0 * k.numel(), 0.0,
            partial(stored, kv_store.store_kv_torch),
        )  # fmt: skip

    return Case("store_kv", error, timed)


def _randn(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).bfloat16()
