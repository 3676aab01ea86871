"""Host cost of one scheduling step, with a fake executor: what the loop spends per step.

`python -m treadle.perf.step_bench` prints p50 and p99 of schedule, update and delivery at several
numbers of running requests and context lengths. No model, no device.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from array import array
from collections.abc import Sequence

import numpy as np

from treadle.engine.assemble import build_scheduler
from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.engine.outbox import Outbox
from treadle.engine.output import RequestOutput
from treadle.engine.planner import Launch
from treadle.engine.request import Request
from treadle.engine.sampling_params import SamplingParams
from treadle.graphs.fake import FakeExecutor
from treadle.graphs.step import Capacity, KvGroup, StepResult

STAGES = ("schedule", "update", "deliver", "step")


def measure(running: int, context: int, page_size: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each stage over `steps` decode steps, by stage."""
    max_len = context + steps + 64
    tokens = running * (max_len + page_size)
    group = KvGroup("full", page_size, tokens // page_size, 1)
    executor = FakeExecutor(Capacity((group,), running, max_len, 50_000))
    config = EngineConfig.from_flags({"chunked_prefill_size": -1, "max_prefill_tokens": tokens})
    info = EngineInfo("fake", "fake", "fake", (), "fake", max_len, 50_000, 0, "0", {})
    scheduler = build_scheduler(Parts(executor, None, info, running, -1, config))
    outbox = Outbox(lambda request: None, lambda request: None)
    params = SamplingParams(steps + 32, ignore_eos=True)
    for number in range(running):
        ids = array("i", np.random.default_rng(number).integers(0, 50_000, context).tolist())
        scheduler.submit(_request(number, ids, max_len, params))
    spent: dict[str, list[float]] = {stage: [] for stage in STAGES}
    while len(scheduler.running) < running or any(r.is_prefilling for r in scheduler.running):
        launch = scheduler.schedule()
        assert launch is not None
        scheduler.update(launch, _result(launch))
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        started = time.perf_counter()
        launch = scheduler.schedule()
        planned = time.perf_counter()
        assert launch is not None and len(launch.rows) == running
        result = _result(launch)
        computed = time.perf_counter()
        outbox.put(scheduler.update(launch, result))
        updated = time.perf_counter()
        outbox.deliver(1.0)
        done = time.perf_counter()
        parts = (planned - started, updated - computed, done - updated)
        for stage, seconds in zip(STAGES, (*parts, sum(parts)), strict=True):
            spent[stage].append(seconds * 1e3)
    return spent


def _request(number: int, ids: array[int], max_len: int, params: SamplingParams) -> Request:
    def sink(delta: RequestOutput) -> None:
        pass

    return Request(
        request_id=str(number), index=0, token_ids=ids, max_len=max_len, params=params, seed=number,
        stop_ids=frozenset({2}), text=None, stream_interval=1, sink=sink,
    )  # fmt: skip


def _result(launch: Launch) -> StepResult:
    rows = len(launch.rows)
    tokens = np.full((rows, 1), 7, dtype=np.int32)
    return StepResult(launch.step.seq, tokens, np.ones(rows, dtype=np.int32), 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="treadle.perf.step_bench", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args(argv)
    print(f"{'running':>8} {'context':>8}" + "".join(f"{s + ' p50':>14}{'p99':>8}" for s in STAGES))
    for running in options.running:
        for context in options.context:
            spent = measure(running, context, options.page_size, options.steps)
            row = "".join(
                f"{statistics.median(spent[s]):>14.3f}{np.percentile(spent[s], 99):>8.3f}"
                for s in STAGES
            )
            print(f"{running:>8} {context:>8}{row}", flush=True)
    print("milliseconds; text and HTTP are not part of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
