from __future__ import annotations

import re
from pathlib import Path

import pytest

from treadle.engine.config import EngineConfig
from treadle.engine.settings import flag
from treadle.tools import compose
from treadle.tools.cli import main
from treadle.tools.tiny_model import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("model"))
    for weights in made.glob("*.safetensors"):
        weights.unlink()  # the description is enough
    return made


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(compose, "load_model", refuse)


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_explain_names_every_setting_once_with_value_and_reason(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, str(folder), "--explain", "--page-size", "16", "--schedule_policy=lpm",
                 "--disable-radix-cache", "--cuda-graph-bs", "4,1", "9",
                 "--graph-capture-budget-ms", "20"]  # fmt: skip
    assert main(arguments) == 0
    table, _, memory = capsys.readouterr().out.partition("\n\n")
    rows = {}
    for line in table.splitlines():
        name, value, why = re.split(r"\s{2,}", line, maxsplit=2)
        assert name not in rows and value and why
        rows[name] = (value, why)
    assert set(rows) == {flag(name) for name in EngineConfig().values()}
    assert rows["--page-size"] == ("16", "given")
    assert rows["--context-length"] == ("512", "the model's")
    assert rows["--schedule-policy"] == ("fcfs", "lpm needs the prefix cache")
    assert rows["--disable-radix-cache"] == ("True", "given")
    assert rows["--max-prefill-tokens"] == ("16384", "default")
    assert rows["--max-queued-requests"] == ("none", "default")
    assert rows["--dtype"] == ("float32", "the checkpoint's own")
    assert rows["--cuda-graph-bs"] == ("1, 4, 9", "given")
    assert rows["--cuda-graph-max-bs"] == ("9", "given")
    assert rows["--piecewise-cuda-graph-max-tokens"] == ("512", "tokens of a usual step")
    assert rows["--piecewise-cuda-graph-tokens"] == ("4, 8, 12, ... 512 (30 sizes)", "SGLang's")
    assert rows["--cuda-graph-backend-prefill"][0] == "breakable"
    assert rows["--graph-capture-budget-ms"] == ("20.0", "given")
    total, *terms = map(float, re.findall(r"(-?[\d.]+) GB", memory.splitlines()[0]))
    assert len(terms) == 5 and total == pytest.approx(sum(terms), abs=1e-9)
    pool = int(rows["--max-total-tokens"][0])
    assert f"The KV pool of {pool} tokens holds {pool / 512:.1f} full contexts." in memory
    assert "Warning: --schedule-policy lpm needs the prefix cache: fcfs is used" in memory


def test_explain_of_an_infeasible_setting_says_what_works(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", str(folder), "--explain", "--max-running-requests"]
    assert main([*arguments, "1G"]) == 1
    error = capsys.readouterr().err
    advised = re.search(r"--max-running-requests (\d+)", error)
    assert advised is not None, error
    assert main([*arguments, advised[1]]) == 0
