"""What tests on a GPU have in common: they are skipped, visibly, where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("cupy")
    pytest.importorskip("triton")
