from __future__ import annotations

import logging
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from treadle.engine import Engine
from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo
from treadle.tools import startup as module
from treadle.tools.compose import compose
from treadle.tools.startup import CURRENT, PHASES, Startup, in_hundredths, own_process
from treadle.tools.tiny_model import make_folder

TICK_S = 0.01  # of the kernel's accounting, on Linux
AGE = """
import time
from treadle.tools.startup import process_age_s
print(time.perf_counter() - process_age_s())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def _no_current() -> Iterator[None]:
    token = CURRENT.set(None)
    yield
    CURRENT.reset(token)


def info() -> EngineInfo:
    return EngineInfo("m", "m", "m", (), "llama", 512, 300, 1, "0", {})


def reports(caplog: pytest.LogCaptureFixture) -> list[dict[str, float]]:
    """Total and terms of every report in the log."""
    found = []
    for record in caplog.records:
        message = record.getMessage()
        if total := re.match(r"Start-up took ([\d.]+) s: ", message):
            terms = (term.rpartition(" ") for term in message[total.end() :].split(" + "))
            found.append({"total": float(total[1])} | {n: float(s) for n, _, s in terms})
    return found


@pytest.mark.parametrize("scale", [0.001, 0.05, 3.0, 1000.0])
def test_rounded_rows_add_up_to_the_rounded_total(scale: float) -> None:
    for _ in range(200):
        rows = {str(i): random.random() * scale for i in range(random.randrange(1, 9))}
        rounded = in_hundredths(rows)
        assert list(rounded) == list(rows)
        assert round(sum(rounded.values()), 2) == round(sum(rows.values()), 2)
        assert all(0 <= rounded[name] == round(rounded[name], 2) for name in rows)
        assert all(abs(rounded[name] - rows[name]) < 0.01 for name in rows)


def test_phases_take_their_time_and_the_rest_is_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=random.uniform(0, 1e6))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    spent = dict.fromkeys((*PHASES, "other"), 0.0)
    startup = Startup(clock.now)
    for name in [*PHASES, *random.choices(PHASES, k=5)]:
        with startup.phase(name):
            clock.now += (inside := random.random())
        clock.now += (outside := random.random())
        spent[name] += inside
        spent["other"] += outside
    with caplog.at_level(logging.INFO, logger="treadle"):
        told = startup.finish(info())
    assert told.startup_s == pytest.approx(spent, abs=0.01)
    assert told.startup_time == pytest.approx(sum(spent.values()), abs=0.0051)
    (report,) = reports(caplog)
    shown = {name.replace("kv_memory", "KV memory"): s for name, s in told.startup_s.items()}
    assert report == {"total": told.startup_time, **shown}


def test_phase_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    startup = Startup(0.0)
    with pytest.raises(OSError), startup.phase("weights"):
        clock.now = 2.0
        raise OSError
    assert startup.finish(info()).startup_s["weights"] == 2.0


@pytest.mark.skipif(sys.platform != "linux", reason="perf_counter is one clock for all processes")
def test_process_begins_when_it_is_made() -> None:
    before = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", AGE], stdout=subprocess.PIPE, text=True) as child:
        after = time.perf_counter()
        said, _ = child.communicate()
    assert before - TICK_S <= float(said) <= after + TICK_S


async def test_embedded_engine_counts_from_its_own_begin(
    folder: Path, caplog: pytest.LogCaptureFixture, _no_current: None
) -> None:
    before = time.perf_counter()
    with caplog.at_level(logging.INFO, logger="treadle"):
        async with await Engine.create(model_path=str(folder)) as engine:
            elapsed = time.perf_counter() - before
            told = engine.info
    (report,) = reports(caplog)
    assert report["total"] == told.startup_time == round(sum(told.startup_s.values()), 2)
    assert set(told.startup_s) == {*PHASES, "other"}
    assert 0 < told.startup_time <= elapsed + 0.01
    assert told.weight_bytes > 0 and told.kv_bytes > 0 and told.available_bytes > 0


def test_server_counts_from_its_process_and_finishes_itself(
    folder: Path, caplog: pytest.LogCaptureFixture, _no_current: None
) -> None:
    startup = own_process()
    config = EngineConfig.from_flags({"model_path": str(folder)})
    with caplog.at_level(logging.INFO, logger="treadle"):
        parts = compose(config, time.perf_counter())
        assert not reports(caplog) and not parts.info.startup_s
        told = startup.finish(parts.info)
    (report,) = reports(caplog)
    age = module.process_age_s()
    assert report["total"] == told.startup_time <= age + 0.01
    assert 0 < told.startup_s["imports"] < told.startup_time, "this process's life until now"


def test_start_of_a_process_is_taken_elsewhere_from_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = module.process_age_s()
    monkeypatch.setattr(module, "Path", lambda _: Path("/nowhere"))
    assert module.process_age_s() == pytest.approx(exact, abs=2.0)  # whole seconds on Linux
