"""Which backend serves what, and how a pair that does not fit is refused."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from treadle.kernels import attention_backends, host
from treadle.kernels.attention_backends import (
    BACKENDS,
    AttentionNeeds,
    Phase,
    choose,
    choose_sampling,
)

CPU = AttentionNeeds("cpu", torch.bfloat16, 64)
GPU = AttentionNeeds("cuda", torch.bfloat16, 128)
PHASES: list[Phase] = ["prefill", "decode"]


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LIBRARY", object())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("requested", [None, "auto"])
def test_auto_takes_the_fastest_that_fits(phase: Phase, requested: str | None) -> None:
    assert choose(GPU, phase, requested).name == "triton"
    assert choose(CPU, phase, requested).name == "host"
    half = AttentionNeeds("cpu", torch.float16, 64)
    assert choose(half, phase, requested).name == "torch_native"
    odd = AttentionNeeds("cpu", torch.bfloat16, 20, window=True)
    assert choose(odd, phase, requested).name == "torch_native"


def test_auto_says_why() -> None:
    reason = choose(GPU, "decode").reason
    assert "GPU" in reason and "decode" in reason and "bfloat16" in reason


def test_a_fitting_request_is_taken() -> None:
    assert choose(GPU, "decode", "torch_native").name == "torch_native"
    assert choose(CPU, "prefill", "torch_native").reason == "asked for"


@pytest.mark.parametrize(
    ("needs", "requested", "why", "instead"),
    [
        (CPU, "triton", "runs on cuda", "host, torch_native"),
        (GPU, "host", "runs on cpu", "triton, torch_native"),
        (AttentionNeeds("cuda", torch.bfloat16, 64, sinks=True), "torch_native", "sinks", "triton"),
        (AttentionNeeds("cuda", torch.float16, 512), "triton", "at most 256", "torch_native"),
        (AttentionNeeds("cpu", torch.float16, 64), "host", "float32, bfloat16", "torch_native"),
        (CPU, "fa3", "no attention backend 'fa3'", "host, torch_native"),
    ],
)
def test_a_pair_that_does_not_fit_names_those_that_do(
    needs: AttentionNeeds, requested: str, why: str, instead: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)) as error:
        choose(needs, "decode", requested)
    assert str(error.value).endswith(f"these fit: {instead}")


def test_nothing_fits_says_what_each_lacks() -> None:
    needs = AttentionNeeds("cpu", torch.bfloat16, 64, softcap=True)
    with pytest.raises(ValueError, match="no backend fits") as error:
        choose(needs, "prefill")
    assert all(backend.name in str(error.value) for backend in BACKENDS)


def test_what_is_not_installed_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LIBRARY", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose(CPU, "decode").name == "torch_native"
    assert choose(GPU, "decode").name == "torch_native"
    assert choose_sampling("cuda").name == "pytorch"
    with pytest.raises(ValueError, match="not built"):
        choose(CPU, "decode", "host")


def test_sampling_backends() -> None:
    assert choose_sampling("cuda").name == "triton"
    assert choose_sampling("cpu", "auto").name == "pytorch"
    assert choose_sampling("cuda", "pytorch") == attention_backends.Choice("pytorch", "asked for")
    for requested in ("triton", "flashinfer"):
        with pytest.raises(ValueError, match="these fit: pytorch"):
            choose_sampling("cpu", requested)
