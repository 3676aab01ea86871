"""What the periodic log lines and the load say of captured graphs."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from fake_engine import capacity, make_parts

from treadle.engine import Engine
from treadle.graphs.fake import FakeExecutor, FakeHandle
from treadle.graphs.step import GraphReport, StepResult

PROMPT = [1, 2, 3]


class Graphed(FakeExecutor):
    """Replays some of its steps, and captures a bucket in each."""

    def __init__(self) -> None:
        super().__init__(capacity())
        self.replayed: list[bool] = []  # by step

    def _run(self, handle: FakeHandle) -> StepResult:
        self.replayed.append(random.random() < 0.5)
        return replace(super()._run(handle), replayed=self.replayed[-1])

    def graphs(self) -> GraphReport:
        captured = tuple(range(1, len(self.replayed) + 1))
        return GraphReport({"decode": captured, "prefill": ()}, {"decode": 99, "prefill": 7}, 1234)


@pytest.mark.parametrize(("device", "label"), [("cpu", "cpu graph"), ("cuda", "cuda graph")])
async def test_lines_say_whether_their_last_step_was_replayed(
    device: str, label: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor = Graphed()
    parts = make_parts(executor, decode_log_interval=3)
    parts = replace(parts, info=replace(parts.info, server_args={"device": device}))
    with caplog.at_level("INFO", logger="treadle"):
        async with Engine(parts) as engine:
            await engine.generate(PROMPT, {"max_new_tokens": 40, "ignore_eos": True})
    found: dict[str, list[bool]] = {"Prefill": [], "Decode": []}
    for record in caplog.records:
        if line := re.search(rf"^(\w+) batch, .*, {label}: (True|False), ", record.getMessage()):
            found[line[1]].append(line[2] == "True")
    assert found["Prefill"] == executor.replayed[:1]
    assert found["Decode"] == executor.replayed[3::3]


async def test_load_has_the_graphs_of_now() -> None:
    executor = Graphed()
    async with Engine(make_parts(executor)) as engine:
        assert engine.load().graphs.captured["decode"] == ()
        await engine.generate(PROMPT, {"max_new_tokens": 5, "ignore_eos": True})
        assert engine.load().graphs == executor.graphs()
        assert engine.load().graphs.captured["decode"] == (1, 2, 3, 4, 5)
