"""Tensors on a GPU go to Triton's kernels. Fake tensors say that they are on one; nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from treadle.kernels import activation, gpu, kv_store, paged_attention, rmsnorm, rope, sampling

pytest.importorskip("triton")

from treadle.kernels.gpu import activation as gpu_activation  # noqa: E402
from treadle.kernels.gpu import kv_store as gpu_kv_store  # noqa: E402
from treadle.kernels.gpu import norm as gpu_norm  # noqa: E402
from treadle.kernels.gpu import paged_attention as gpu_attention  # noqa: E402
from treadle.kernels.gpu import rope as gpu_rope  # noqa: E402
from treadle.kernels.gpu import sampling as gpu_sampling  # noqa: E402

CASES: list[tuple[Callable[..., Any], ModuleType, str, int]] = [
    (rmsnorm.rms_norm, gpu_norm, "rms_norm", 3),
    (rmsnorm.add_rms_norm, gpu_norm, "add_rms_norm", 4),
    (rope.apply_rope, gpu_rope, "apply_rope", 5),
    (activation.silu_and_mul, gpu_activation, "silu_and_mul", 1),
    (activation.gelu_tanh_and_mul, gpu_activation, "gelu_tanh_and_mul", 1),
    (kv_store.store_kv, gpu_kv_store, "store_kv", 5),
    (paged_attention.paged_attention, gpu_attention, "paged_attention", 5),
    (sampling.sample, gpu_sampling, "sample", 4),
    (sampling.row_peaks, gpu_sampling, "row_peaks", 1),
    (sampling.best_keys, gpu_sampling, "best_keys", 6),
]


@pytest.fixture
def on_gpu() -> Iterator[torch.Tensor]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.empty(4, 2, 64, device="cuda")


@pytest.mark.parametrize(("front", "module", "name", "arguments"), CASES)
def test_gpu_tensors_go_to_triton(
    on_gpu: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    front: Callable[..., Any],
    module: ModuleType,
    name: str,
    arguments: int,
) -> None:
    monkeypatch.setattr(gpu, "HAS_TRITON", True)
    got: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, name, lambda *given: got.append(given))
    front(*[on_gpu] * arguments)
    assert len(got) == 1
    assert all(argument is on_gpu for argument in got[0][:arguments])


def test_without_triton_torch_serves(on_gpu: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "HAS_TRITON", False)
    monkeypatch.setattr(gpu_activation, "silu_and_mul", lambda *_: pytest.fail("triton ran"))
    got: list[torch.Tensor] = []
    monkeypatch.setattr(activation, "silu_and_mul_torch", got.append)
    activation.silu_and_mul(on_gpu)
    assert got[0] is on_gpu
