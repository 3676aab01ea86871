"""What is captured next and when, on a backend that takes as long as it is told."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from treadle.graphs.backends import Body, CaptureError, Graph
from treadle.graphs.buckets import Buckets, GraphKey
from treadle.graphs.capture import BackgroundCapture, GraphTable, all_keys, keys_of
from treadle.graphs.step import GraphChoice, Mode, SamplingBatch, StepPlan

BUCKETS = Buckets((1, 2, 4), (8, 16))


class Made:
    def __init__(self, body: Body) -> None:
        self.replay = body


class Slow:
    """A backend on a clock of its own."""

    name = "cpu graph"
    needs_warm_up = True

    def __init__(self, seconds: float = 0.003, bytes_each: int = 10) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.fails = False
        self.error: Exception = CaptureError("out of luck")
        self._each = bytes_each
        self._bytes = 0

    def capture(self, body: Body) -> Graph:
        if self.fails:
            raise self.error
        self.now += self.seconds
        self._bytes += self._each
        return Made(body)

    def synchronize(self) -> None:
        pass

    def num_bytes(self) -> int:
        return self._bytes

    def clear(self) -> None:
        self._bytes = 0


class Bench:
    """A table and its background capture; `ran` has the bodies in the order they ran."""

    def __init__(self, budget_ms: float = 100.0, reserve: int | None = None) -> None:
        self.backend = Slow()
        self.ran: list[str] = []
        parts = {"prefill": 3}
        self.table = GraphTable(
            self.backend,
            BUCKETS,
            lambda key: [
                lambda p=part: self.ran.append(f"{key} {p}")  # type: ignore[misc]
                for part in range(parts.get(key.kind, 1))
            ],
            lambda: self.ran.append("padding"),
        )
        self.capture = BackgroundCapture(
            self.table, budget_ms, reserve, clock=lambda: self.backend.now
        )

    def capture_all(self) -> None:
        while self.capture.has_more:
            self.capture.one()


def decode(rows: int) -> GraphKey:
    return GraphKey("decode", rows, rows)


def a_plan(q_lens: list[int], mode: Mode, *, split: bool = False, samples: bool = True) -> StepPlan:
    count = len(q_lens)
    ints = np.zeros(count, dtype=np.int32)
    return StepPlan(
        mode=mode, req_slot=ints, epoch=ints, q_len=np.array(q_lens, dtype=np.int32),
        from_host=np.full(count, mode != "decode"), max_len=ints + 50,
        samples=np.full(count, samples), token_ids=np.zeros(sum(q_lens), dtype=np.int32),
        page_updates={}, slot_init=None,
        sampling=SamplingBatch(
            np.zeros(count, dtype=np.float32), True, np.full(count, True) if split else None
        ),
    )  # fmt: skip


def test_the_largest_of_each_phase_comes_first_and_everything_once() -> None:
    keys = all_keys(BUCKETS)
    assert keys[:2] == [decode(4), GraphKey("prefill", 16, 0)]
    assert list(map(str, keys[2:7])) == [
        "decode bs=1", "head bs=1", "prefill tokens=8", "sample bs=1", "decode_split bs=1",
    ]  # fmt: skip
    assert len(keys) == len(set(keys)) == 4 * 3 + 2


@pytest.mark.parametrize(
    ("plan", "choice", "keys"),
    [
        (a_plan([1] * 3, "decode"), (4, 4), ["decode bs=4"]),
        (a_plan([1] * 2, "decode", split=True), (2, 2), ["decode_split bs=2", "sample bs=2"]),
        (a_plan([1] * 5, "decode"), (5, 5), ["decode bs=5"]),
        (a_plan([3, 6], "prefill"), (16, 2), ["prefill tokens=16", "head bs=2", "sample bs=2"]),
        (a_plan([7], "prefill", samples=False), (8, 0), ["prefill tokens=8"]),
        (a_plan([1, 1, 40], "mixed"), (42, 4), ["prefill tokens=42", "head bs=4", "sample bs=4"]),
    ],
)
def test_a_step_runs_in_the_smallest_shape_that_holds_it(
    plan: StepPlan, choice: tuple[int, int], keys: list[str]
) -> None:
    bench = Bench()
    made = bench.table.choose(plan)
    assert (made.tokens, made.rows, made.replays) == (*choice, False)
    assert [str(key) for key in keys_of(plan, made)] == keys
    bench.capture_all()
    in_ladder = plan.num_tokens <= 16 if plan.mode != "decode" else plan.num_rows <= 4
    assert bench.table.choose(plan) == GraphChoice(*choice, in_ladder)


def test_a_step_replays_only_when_all_its_graphs_are_there() -> None:
    bench = Bench()
    plan = a_plan([3, 6], "prefill")
    for key in (GraphKey("prefill", 16, 0), GraphKey("head", 2, 2)):
        bench.capture.capture(key)
        assert not bench.table.choose(plan).replays
    bench.capture.capture(GraphKey("sample", 2, 2))
    assert bench.table.choose(plan).replays


def test_bodies_warm_up_on_padding_and_replay_by_part() -> None:
    bench = Bench()
    key = GraphKey("prefill", 8, 0)
    bench.capture.capture(key)
    assert bench.ran == ["padding", *(f"prefill tokens=8 {part}" for part in range(3))]
    bench.table.replay(key, 2)
    assert bench.ran[-1] == "prefill tokens=8 2"


def test_idle_captures_what_was_asked_for_first_then_the_rest() -> None:
    bench = Bench()
    bench.capture.ask([decode(2)])
    bench.capture.ask([GraphKey("head", 1, 1), decode(2)])
    bench.capture.when_idle()
    bench.capture.when_idle()
    bench.capture.when_idle()
    assert [key in bench.table for key in (decode(2), GraphKey("head", 1, 1), decode(4))] == [
        True, True, True,
    ]  # fmt: skip
    while not bench.capture.is_done:
        bench.capture.when_idle()
    assert all(key in bench.table for key in all_keys(BUCKETS))


@pytest.mark.parametrize(
    ("budget_ms", "cost_ms", "step_ms", "steps", "captured"),
    [
        (100.0, 3.0, 10.0, 1, True),  # short beside a step
        (100.0, 6.0, 10.0, 1, False),
        (100.0, 6.0, 10.0, 128, True),  # long, but seldom
        (5.0, 6.0, 10.0, 128, False),  # beyond the budget
        (0.0, 0.001, 10.0, 128, False),  # never under load
    ],
)
def test_under_load_a_capture_fits_the_budget_and_is_short_or_seldom(
    budget_ms: float, cost_ms: float, step_ms: float, steps: int, captured: bool
) -> None:
    bench = Bench(budget_ms)
    bench.backend.seconds = cost_ms / 1e3
    bench.capture.first()
    bench.capture.ask([decode(2)])
    for _ in range(steps):
        bench.capture.after_step(step_ms)
    assert (decode(2) in bench.table) is captured
    assert decode(1) not in bench.table  # nobody asked for it


def test_steps_that_replay_cause_no_capture() -> None:
    bench = Bench()
    bench.capture.first()
    for _ in range(1000):
        bench.capture.after_step(50.0)
    assert [key for key in all_keys(BUCKETS) if key in bench.table] == [decode(4)]


def test_reserve_that_is_used_up_stops_capture_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(reserve=35)
    bench.capture_all()
    assert sum(key in bench.table for key in all_keys(BUCKETS)) == 2
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1 and "--cuda-graph-max-bs" in lines[0]
    assert bench.capture.is_done


@pytest.mark.parametrize("error", [CaptureError("out of luck"), TypeError("a bug in a body")])
def test_kind_that_fails_is_given_up_and_the_others_go_on(error: Exception) -> None:
    bench = Bench()
    bench.backend.fails, bench.backend.error = True, error
    bench.capture.capture(decode(4))
    bench.backend.fails = False
    bench.capture_all()
    report = bench.table.report()
    assert report.captured == {"decode": (), "prefill": (8, 16)}
    assert report.planned == {"decode": 3, "prefill": 2}


def test_warm_up_that_raises_gives_its_kind_up() -> None:
    bench = Bench()

    def fail() -> None:
        raise RuntimeError("out of memory")

    bench.table._before_capture = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.table.capture(decode(1))
    bench.table._before_capture = lambda: None
    bench.table._parts = lambda key: [fail]
    bench.capture_all()
    assert bench.capture.is_done and bench.table.report().captured["decode"] == ()


def test_after_a_release_everything_is_captured_anew() -> None:
    bench = Bench()
    bench.capture_all()
    bench.capture.stop()
    bench.table.clear()
    assert bench.capture.is_done and bench.backend.num_bytes() == 0
    assert not bench.table.choose(a_plan([1], "decode")).replays
    bench.capture.start()
    bench.capture_all()
    assert bench.table.choose(a_plan([1], "decode")).replays


def test_end_of_each_phase_is_logged_with_its_sizes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench()
    bench.capture.first()
    bench.capture_all()
    ends = [r.message for r in caplog.records if "end." in r.message]
    assert ends == [
        "Capture target prefill CPU graph end. num_tokens=[8, 16], elapsed=0.02 s, "
        "mem usage=0.00 GB.",
        "Capture target decode CPU graph end. bs=[1, 2, 4], elapsed=0.04 s, mem usage=0.00 GB.",
    ]
