"""The bench's own arithmetic: what it adds up, what a late host costs on the virtual device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from treadle.perf.overlap_bench import PARTS


def measure(*flags: str) -> dict[str, Any]:
    """In a process of its own: the bench wraps functions of the product and freezes the heap."""
    command = [sys.executable, "-m", "treadle.perf.overlap_bench", "--json", *flags]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


@pytest.mark.model
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="in process"),
        pytest.param(["--http"], id="http", marks=pytest.mark.slow),
    ],
)
def test_parts_add_up_and_a_slow_device_never_idles(
    flags: list[str],
) -> None:
    found = measure("--streams", "8", "--tokens", "60", "--step-ms", "1000", *flags)
    assert set(found["runs"]) == {"plain", "giving way", "with a stopwatch"}
    for figures in found["runs"].values():
        assert figures["num_steps"] > 40
        assert figures["idle"] == 0
        assert figures["idle_awaited"] == pytest.approx(0, abs=1e-4)
        assert figures["tokens_per_delta"] == pytest.approx(1, abs=0.1)
    split = found["runs"]["with a stopwatch"]
    assert set(split["parts_ms"]) == set(PARTS)
    assert sum(split["parts_ms"].values()) == pytest.approx(split["host_ms"])
    assert (found["socket_floor_ms"] is not None) == bool(flags)


@pytest.mark.model
def test_device_without_work_of_its_own_waits_for_the_host() -> None:
    plain = measure("--streams", "4", "--tokens", "40", "--step-ms", "0.001")["runs"]["plain"]
    assert plain["idle"] * 0.001 == pytest.approx(plain["host_ms"], rel=0.1)
