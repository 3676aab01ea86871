"""Fixtures of the kernel tests: which implementation runs, and poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from treadle.kernels import host


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
