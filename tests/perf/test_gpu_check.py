"""The GPU check's own machinery, and its sections at tiny sizes on the host."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton_interpreter

from treadle.graphs.buckets import Buckets
from treadle.graphs.step import Capacity, KvGroup
from treadle.kernels import host
from treadle.perf import gpu_check
from treadle.perf.gpu import (
    copies,
    environment,
    kernels,
    memory,
    models,
    ranks,
    replay,
    results,
    suite,
)
from treadle.perf.gpu import worker as worker_module
from treadle.perf.gpu.player import Player, Work, play
from treadle.perf.gpu.rig import Rig, Room
from treadle.perf.gpu.sections import SECTIONS, Failed, Row, Section, Setting, Unit, Unmeasured
from treadle.perf.gpu.shapes import LLAMA_8B, QWEN3_600M, SMALL, count_parameters
from treadle.perf.gpu.supervisor import Supervisor
from treadle.perf.gpu.twin import BUCKETS, Twin

TINY = Setting("cpu", is_tiny=True)
needs_graphs = pytest.mark.skipif(host.LIBRARY is None, reason="the host kernels are not built")


def fail(error: Exception) -> Any:
    raise error


def test_worker_turns_every_outcome_into_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    units = [
        Unit("good", lambda: {"n": 1}),
        Unit("absent", lambda: fail(Unmeasured("no such thing"))),
        Unit("wrong", lambda: fail(Failed("off by one", {"n": 2}))),
        Unit("broken", lambda: fail(ZeroDivisionError("by\nzero"))),
    ]
    rows = [worker_module.measure("s", unit) for unit in units]
    assert [(row.problem, row.is_failure) for row in rows] == [
        (None, False), ("no such thing", False), ("off by one", True),
        ("ZeroDivisionError: by zero", True),
    ]  # fmt: skip
    assert [row.values for row in rows] == [{"n": 1}, {}, {"n": 2}, {}]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_worker_skips_what_is_done_and_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    units = [Unit(name, lambda name=name: ran.append(name) or {}) for name in "abc"]  # type: ignore[misc, func-returns-value]
    monkeypatch.setattr(Section, "units", lambda self, setting: units)
    said: list[dict[str, Any]] = []
    assert worker_module.work(SECTIONS[0], TINY, ["b"], said.append) == 0
    assert ran == ["a", "c"]
    assert said[0] == {"plan": ["a", "c"]} and said[1] == {"begin": "a"}
    assert [message["row"]["name"] for message in said if "row" in message] == ["a", "c"]


CHILD = """
import json, os, sys, time
done = json.loads(sys.stdin.read())
names = [name for name in {names} if name not in done]
def say(message): print(json.dumps(message), flush=True)
say({{"plan": names}})
for name in names:
    say({{"begin": name}})
    if name == "crash": os.abort()
    if name == "hang": time.sleep(600)
    if name == "late": os._exit(5)
    say({{"row": {{"section": "s", "name": name}}}})
    if name == "lost": sys.exit(3)
"""


def supervise(child: str, done: list[str], limit_s: float = 60.0) -> dict[str, Row]:
    rows: list[Row] = []
    supervisor = Supervisor(TINY, rows.append, [sys.executable, "-c", child])
    supervisor.run(Section("s", "", limit_s, ""), done, limit_s)
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def test_supervisor_goes_on_in_a_fresh_process_after_a_crash_or_a_lost_device() -> None:
    names = ["one", "crash", "two", "lost", "late", "three"]
    rows = supervise(CHILD.format(names=names), ["two"])
    assert list(rows) == ["one", "crash", "lost", "late", "three"]
    assert rows["crash"].is_failure and "SIGABRT" in str(rows["crash"].problem)
    assert rows["late"].is_failure and "status 5" in str(rows["late"].problem)
    assert not any(rows[name].problem for name in ("one", "lost", "three"))


def test_supervisor_ends_a_unit_that_takes_too_long_and_names_what_was_not_reached() -> None:
    rows = supervise(CHILD.format(names=["one", "hang", "two"]), [], limit_s=5.0)
    assert rows["one"].problem is None
    assert rows["hang"].is_failure and rows["hang"].problem == "not done within 5 s"
    assert not rows["two"].is_failure and "not reached" in str(rows["two"].problem)


@pytest.mark.parametrize("child", ["import sys; sys.exit(4)", "raise ImportError('gone')"])
def test_supervisor_reports_a_process_that_never_starts(child: str) -> None:
    rows = supervise(child, [])
    assert list(rows) == ["start"] and rows["start"].is_failure


def test_supervisor_does_not_restart_a_process_that_gets_nowhere() -> None:
    child = """import json, sys; print(json.dumps({"plan": ["a"]}), flush=True); sys.exit(3)"""
    rows = supervise(child, [])
    assert "status 3" in str(rows["a"].problem)


def test_results_are_complete_on_disk_after_every_row_and_resume_without_problems(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.json"
    found = results.Results(path)
    for row in (Row("a", "x", {"n": 1.5}), Row("a", "y", problem="off", is_failure=True)):
        found.add(row)
        assert json.loads(path.read_text())["rows"][-1]["name"] == row.name
    found.add(Row("b", "z", problem="absent"))
    assert [row.name for row in found.failures] == ["y"]
    assert [row.name for row in found.unmeasured] == ["z"]
    again = results.Results(path, path)
    assert again.rows == [Row("a", "x", {"n": 1.5})] and again.done("a") == ["x"]
    path.write_text("{}")
    with pytest.raises(ValueError, match="no rows of this check"):
        results.Results(None, path)


def test_table_shows_every_word_within_its_width() -> None:
    values: dict[str, Any] = {f"value_{n}": random.random() * 10**n for n in range(12)}
    text = results.line(Row("models", "a name", values, problem="because of this", is_failure=True))
    assert max(map(len, text.splitlines())) <= results.WIDTH
    assert "FAIL" in text and "because of this" in text.replace("\n", " ")
    assert all(f"{name}=" in text for name in values)


def test_check_runs_chosen_sections_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--rehearse", "--only", "env", "--resume", str(path)]
    assert gpu_check.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["section"] for row in rows} == {"env"}
    assert next(row for row in rows if row["name"] == "packages")["values"]["torch"]
    rows[0]["values"]["kept"] = 1
    path.write_text(json.dumps({"rows": rows}))
    assert gpu_check.main(arguments) == 0
    assert json.loads(path.read_text())["rows"][0]["values"]["kept"] == 1
    shown = capsys.readouterr().out
    assert "packages" in shown and "not measured" in shown


def test_check_stops_at_its_limit_with_a_word_for_each_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = results.Results(None)
    gpu_check.run(SECTIONS, TINY, found, limit_s=0.0)
    assert [row.section for row in found.rows] == [section.name for section in SECTIONS]
    assert all("--resume" in str(row.problem) for row in found.rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_check_without_a_gpu_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--only", "kernels", "copies"]) == 2
    shown = capsys.readouterr().out
    assert shown.count("\n") == 1 and "kernels" in shown and "models" not in shown


def test_limits_of_all_sections_fit_into_the_total() -> None:
    assert sum(section.limit_s for section in SECTIONS) <= gpu_check.TOTAL_S


def test_shapes_have_the_published_numbers_of_parameters() -> None:
    assert count_parameters(QWEN3_600M.spec)["read"] == pytest.approx(596e6, rel=0.01)
    llama = count_parameters(LLAMA_8B.spec)
    embedding = 128_256 * 4096
    assert llama["read"] + embedding == pytest.approx(8.03e9, rel=0.01)
    assert llama["layers"] == pytest.approx(8.03e9 - 2 * embedding, rel=0.01)


def capacity(slots: int, pages: int, page_size: int) -> Capacity:
    return Capacity((KvGroup("full", page_size, pages, 1),), slots, 512, 100)


def test_player_gives_pages_once_and_tells_the_device_of_each() -> None:
    page_size = random.randint(1, 7)
    player = Player(capacity(5, 600, page_size), random.randrange(2**31))
    table: dict[tuple[int, int], int] = {}
    lengths = [0] * 5
    for _ in range(60):
        slots = random.sample(range(5), random.randint(1, 5))
        rows = []
        for slot in slots:
            fresh = lengths[slot] == 0 or lengths[slot] > 60
            if fresh:
                player.restart(slot, start := random.choice((0, 9)))
                lengths[slot] = start
                table = {key: page for key, page in table.items() if key[0] != slot}
            count = random.choice((None, 4))
            rows.append(Work(slot, None if count is None else player.tokens(count)))
            lengths[slot] += count or 1
        plan = player.step(rows).plan
        for update in plan.page_updates.values():
            entries = zip(update.req_slot, update.index, update.page_id, strict=True)
            table |= {(int(slot), int(index)): int(page) for slot, index, page in entries}
        assert plan.max_len.tolist() == [lengths[slot] for slot in slots]
        assert len(set(table.values())) == len(table)
        for slot in slots:
            assert {index for s, index in table if s == slot} == set(
                range(-(-lengths[slot] // page_size))
            )


def test_player_names_modes_and_begins_sequences_once() -> None:
    player = Player(capacity(3, 60, 4), 1)
    player.restart(1, 10)
    first = player.step([Work(0, [1, 2]), Work(1)], banned=[(1, 5)])
    assert first.seq == 1 and first.plan.mode == "mixed"
    assert first.plan.slot_init is not None
    assert first.plan.slot_init.length.tolist() == [0, 10]
    assert first.plan.max_len.tolist() == [2, 11] and first.plan.token_ids.tolist() == [1, 2]
    second = player.step([Work(0), Work(1)])
    assert second.seq == 2 and second.plan.mode == "decode" and second.plan.slot_init is None
    assert player.step([Work(2, [3])]).plan.mode == "prefill"


@needs_graphs
@pytest.mark.parametrize("page_size", [1, 5])
def test_replay_section_finds_graphs_and_eager_equal(page_size: int) -> None:
    values = replay.replay("cpu", "float32", page_size)
    assert values["graphs"] == len(list(BUCKETS.decode_rows)) * 4 + len(BUCKETS.prefill_tokens)
    assert isinstance(values["replayed"], int) and values["replayed"] > 60
    assert isinstance(values["eager_while_capturing"], int) and values["eager_while_capturing"] > 0


@needs_graphs
async def test_twin_notices_a_difference_in_the_cache_of_one_side() -> None:
    twin = Twin(SMALL.spec, "cpu", 4)
    try:
        step = twin.player.step([Work(0, twin.player.tokens(9)), Work(1, twin.player.tokens(3))])
        await twin.compare(step)
        k, _ = twin.eager.memory.layers[1]
        k[int(step.plan.page_updates["full"].page_id[0]) * 4] += 1
        with pytest.raises(Failed, match="logits differ"):
            await twin.compare(twin.player.step([Work(0), Work(1)]))
    finally:
        await twin.close()


@needs_graphs
async def test_twin_notices_a_graph_that_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(SMALL.spec, "cpu", 4)
    try:
        await twin.while_capturing(60.0)
        monkeypatch.setattr("treadle.perf.gpu.twin.all_keys", lambda _: [None])
        with pytest.raises(Failed, match="never replayed: None"):
            await twin.every_graph()
    finally:
        await twin.close()


@needs_graphs
def test_models_section_measures_eager_and_graphs() -> None:
    rows = {unit.name: unit.measure() for unit in models.units(TINY)}
    assert len(rows) == 1 + 1 + len(models.TINY.batches) + len(models.TINY.prefills) + 3
    assert rows["small graphs"]["graphs"] == 10 and float(rows["small graphs"]["graph_mb"]) > 0
    for name, values in rows.items():
        if "decode" in name or "prefill" in name:
            assert all(float(values[f"{way}_ms"]) > 0 for way in ("eager", "graphs")), name


@needs_graphs
async def test_probe_sends_steps_past_their_graphs_in_the_same_shape() -> None:
    rig = Rig(SMALL.spec, Room(4, 512, Buckets((4,), (8,))), "cpu")
    try:
        rig.executor.prepare(all_graphs=True)
        seen = []
        for is_eager in (False, True):
            rig.probe.is_eager = is_eager
            for slot in range(3):
                rig.player.restart(slot, 6)
            step = rig.player.step([Work(slot) for slot in range(3)])
            (result,) = await play(rig.executor, [step])
            choice = rig.executor.runner.graphs.choose(step.plan)
            seen.append((result.replayed, choice.rows, choice.replays))
        assert seen == [(True, 4, True), (False, 4, False)]
        assert rig.probe.idle_ms() >= 0 and len(rig.probe.stamps) == 2
    finally:
        await rig.close()


@needs_graphs
@pytest.mark.parametrize("tags", memory._CASES)
def test_memory_section_gets_the_same_answer(tags: Any) -> None:
    assert memory.cycle(TINY, tags)["tokens"] == 63


@pytest.mark.parametrize("unit", copies.units(TINY), ids=lambda unit: unit.name)
def test_copies_section_moves_what_it_says(unit: Unit) -> None:
    assert unit.measure()["mb"] == pytest.approx(2 * 3 * 4 * 16 * 2 * 32 * 2 / 1e6)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (triton_interpreter.HAS_TRITON and triton_interpreter.IS_INTERPRETED):
        pytest.skip("Triton's interpreter is off")
    from triton.runtime import interpreter

    if interpreter.InterpreterBuilder.cast_impl.__module__ != triton_interpreter.__name__:
        triton_interpreter.mend()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_kernels_section_passes_in_the_interpreter(interpreted: None) -> None:
    units = kernels.units(TINY)
    assert len(units) > 12
    with np.errstate(all="ignore"):
        for unit in units:
            values = unit.measure()
            assert 0 <= float(values["error"]) <= 1 and values["us"], unit.name


def test_kernels_section_fails_a_wrong_kernel(
    interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.kernels.gpu import norm

    right: Callable[..., torch.Tensor] = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda *given: right(*given) * 1.1)
    unit = next(unit for unit in kernels.units(TINY) if unit.name == "rms_norm")
    with np.errstate(all="ignore"), pytest.raises(Failed, match="wrong on a small input"):
        unit.measure()


def test_suite_finds_the_files_with_gpu_tests_and_reads_outcomes(tmp_path: Path) -> None:
    names = [path.name for path in suite.gpu_files(suite.ROOT / "tests")]
    assert {"test_gpu_attention.py", "test_page_copy.py", "test_arena.py"} <= set(names)
    assert "test_gpu_check.py" not in names
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "def test_absent(): pytest.skip('no CUDA device')\n"
    )
    with pytest.raises(Failed, match="test_bad") as caught:
        suite.run(file, TINY)
    assert caught.value.values["passed"] == 1 and caught.value.values["failed"] == 1
    assert "no CUDA device" in str(caught.value.values["skipped"])
    file.write_text("def test_elsewhere(): pass\n")
    with pytest.raises(Unmeasured, match="no test ran"):
        suite.run(file, TINY)


def test_environment_names_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_PACKAGES", ("torch", "no-such-package"))
    values = environment.packages()
    assert values["missing"] == "no-such-package" and values["torch"]
    with pytest.raises(Unmeasured):
        environment.clocks(TINY)


def test_models_unit_that_ran_another_way_than_asked_fails() -> None:
    with pytest.raises(Failed, match="ran eagerly"):
        models._check(False, "graphs")
    with pytest.raises(Failed, match="in graphs"):
        models._check(True, "eager")


def test_ranks_section_finds_the_same_tokens() -> None:
    assert ranks.same_tokens(TINY, 2)["tokens"] == ranks.SMALL.rows * (1 + 2 * ranks.SMALL.steps)


def test_ranks_section_names_the_gpus_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(Unmeasured, match="4 GPUs are needed, this machine has 1"):
        ranks.same_tokens(Setting(), 4)
