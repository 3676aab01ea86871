"""Fixtures of the kernel tests: which implementation runs, and poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter

from treadle.kernels import host
from treadle.kernels.tape import Workspace

if triton_interpreter.HAS_TRITON and triton_interpreter.IS_INTERPRETED:
    triton_interpreter.mend()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty is full of NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["torch", "host"])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModuleType, str], Callable[..., Any]]:
    """Picks a kernel of a module: its torch version, or the compiled one and nothing else."""

    def pick(module: ModuleType, name: str) -> Callable[..., Any]:
        plain: Callable[..., Any] = getattr(module, f"{name}_torch")
        if request.param == "torch":
            return plain
        if host.LIBRARY is None:
            pytest.skip("the host kernels are not built")
        monkeypatch.setattr(module, f"{name}_torch", lambda *_: pytest.fail("torch ran instead"))
        compiled: Callable[..., Any] = getattr(module, name)
        return compiled

    return pick


@pytest.fixture
def played() -> Callable[..., Any]:
    """Records a call, changes its inputs, plays the tape; returns what the call returned."""

    def play(body: Callable[[], Any], change: Callable[[], object]) -> Any:
        memory = torch.empty(1 << 22, dtype=torch.uint8)
        results: list[Any] = []
        tape = host.record(lambda: results.append(body()), Workspace(memory))
        change()
        memory.fill_(0xFF)  # NaN in every dtype: what the tape does not write shows
        tape.play()
        return results[0]

    if host.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    return play


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter"),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def gpu_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where a Triton kernel runs: the interpreter on a CPU, or a GPU."""
    if not triton_interpreter.HAS_TRITON:
        pytest.skip("Triton is not installed")
    if request.param == "cuda" and triton_interpreter.IS_INTERPRETED:
        pytest.skip("no CUDA device: the kernels are interpreted")
    if request.param == "cpu" and not triton_interpreter.IS_INTERPRETED:
        pytest.skip("the kernels are compiled in this process; TRITON_INTERPRET=1 interprets them")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small: threads would only wait for each other
    with np.errstate(all="ignore"):  # a device overflows without a word
        yield torch.device(request.param)
    torch.set_num_threads(threads)
