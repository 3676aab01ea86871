"""Fixtures for every package's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import triton_interpreter  # noqa: F401  (says how Triton runs before anything imports it)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The embedded checkpoint: TREADLE_TEST_GGUF, or downloaded once into the user's cache."""
    given = os.environ.get("TREADLE_TEST_GGUF")
    if given:
        return Path(given)
    from treadle.tools.embedded_model import ensure_embedded_model

    return ensure_embedded_model(print)


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
