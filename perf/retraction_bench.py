"""Admission and retraction by SGLang's rules and by ours, on the same traffic in virtual time.

`python -m treadle.perf.retraction_bench`. The real scheduler runs; a step's time is computed from a
linear model of a device, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treadle.engine.assemble import build_scheduler
from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.engine.output import RequestOutput
from treadle.engine.planner import Launch
from treadle.engine.request import Request
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.scheduler import Scheduler
from treadle.graphs.fake import FakeExecutor
from treadle.graphs.step import Capacity, KvGroup, StepResult

EOS = 2
STEP_MS, PREFILL_MS, DECODE_MS = 8.0, 0.05, 0.02  # a step, a prompt token, a decode row


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that all wait from the start; outputs end long before max_new_tokens."""

    requests: int
    prompt_len: int
    mean_output: int
    max_new_tokens: int
    pool_tokens: int
    seed: int

    def output_lens(self) -> list[int]:
        rng = random.Random(self.seed)
        return [
            max(1, min(self.max_new_tokens, round(rng.expovariate(1 / self.mean_output))))
            for _ in range(self.requests)
        ]


@dataclass(slots=True)
class Outcome:
    """In virtual time."""

    output_tokens: int = 0
    elapsed_ms: float = 0.0
    retractions: int = 0
    prefilled_tokens: int = 0
    usage: float = 0.0
    last_quarter_rate: float = 0.0  # tokens a second while the last quarter of requests ended


def run(traffic: Traffic, admission: str, conservativeness: float) -> Outcome:
    """Every request to its end. Raises: RuntimeError when the scheduler stops making progress."""
    scheduler = _scheduler(traffic, admission, conservativeness)
    targets = {}
    for number, length in enumerate(traffic.output_lens()):
        request = _request(number, traffic)
        targets[request] = length
        scheduler.submit(request)
    outcome, ended, steps, mark = Outcome(), 0, 0, (0, 0.0)
    while scheduler.has_work:
        launch = scheduler.schedule()
        if launch is None:
            raise RuntimeError("nothing can run and nothing is in flight")
        steps += 1
        outcome.elapsed_ms += (
            STEP_MS + PREFILL_MS * launch.num_prefill_tokens + DECODE_MS * launch.num_decode_rows
        )
        outcome.prefilled_tokens += launch.num_prefill_tokens
        outcome.usage += scheduler.pages.num_used_tokens / scheduler.pages.max_tokens
        touched = scheduler.update(launch, _result(launch, targets))
        outcome.output_tokens += len(touched)
        ended += sum(request.finish_reason is not None for request in touched)
        if ended < traffic.requests * 3 // 4:
            mark = (outcome.output_tokens, outcome.elapsed_ms)
    scheduler.check_integrity()
    outcome.retractions = scheduler.num_retracted
    outcome.usage /= steps
    outcome.last_quarter_rate = (
        (outcome.output_tokens - mark[0]) / (outcome.elapsed_ms - mark[1]) * 1e3
    )
    return outcome


def _scheduler(traffic: Traffic, admission: str, conservativeness: float) -> Scheduler:
    max_len = traffic.prompt_len + traffic.max_new_tokens
    group = KvGroup("full", 1, traffic.pool_tokens, 1)
    executor = FakeExecutor(Capacity((group,), 256, max_len, 50_000), depth=1)
    config = EngineConfig.from_flags(
        {"admission": admission, "schedule_conservativeness": conservativeness}
    )
    info = EngineInfo("fake", "fake", "fake", (), "fake", max_len, 50_000, 0, "0", {})
    return build_scheduler(Parts(executor, None, info, 256, 2048, config))


def _request(number: int, traffic: Traffic) -> Request:
    def sink(delta: RequestOutput) -> None:
        pass

    rng = np.random.default_rng(traffic.seed * 1000 + number)
    ids = array("i", rng.integers(3, 50_000, traffic.prompt_len).tolist())
    return Request(
        request_id=str(number), index=0, token_ids=ids,
        max_len=traffic.prompt_len + traffic.max_new_tokens,
        params=SamplingParams(traffic.max_new_tokens), seed=number, stop_ids=frozenset({EOS}),
        text=None, stream_interval=1, sink=sink,
    )  # fmt: skip


def _result(launch: Launch, targets: dict[Request, int]) -> StepResult:
    """Each request ends when it has its length; other tokens are its own, so nothing is shared."""
    tokens = np.zeros((len(launch.rows), 1), dtype=np.int32)
    for place, row in enumerate(launch.rows):
        generated = row.request.num_generated + 1
        is_last = generated >= targets[row.request]
        tokens[place] = EOS if is_last else 3 + (hash((row.request.request_id, generated)) % 40_000)
    accepted = launch.step.plan.samples.astype(np.int32)
    return StepResult(launch.step.seq, tokens, accepted, 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="treadle.perf.retraction_bench", description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--prompt-len", type=int, default=200)
    parser.add_argument("--mean-output", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=2000)
    parser.add_argument("--pool-tokens", type=int, default=16_000)
    parser.add_argument("--conservativeness", type=float, nargs="+", default=[1.0, 0.3, 0.05])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    logging.getLogger("treadle").setLevel(logging.ERROR)
    traffic = Traffic(options.requests, options.prompt_len, options.mean_output,
                      options.max_new_tokens, options.pool_tokens, options.seed)  # fmt: skip
    print(f"{'admission':>10} {'conserv.':>9} {'tok/s':>8} {'last 1/4':>9} {'usage':>6} "
          f"{'retracted':>10} {'prefilled':>10}")  # fmt: skip
    for conservativeness in options.conservativeness:
        rates = {}
        for admission in ("sglang", "observed"):
            found = run(traffic, admission, conservativeness)
            rates[admission] = found.output_tokens / found.elapsed_ms * 1e3
            print(
                f"{admission:>10} {conservativeness:>9.2f} {rates[admission]:>8.0f} "
                f"{found.last_quarter_rate:>9.0f} {found.usage:>6.2f} {found.retractions:>10} "
                f"{found.prefilled_tokens:>10}",
                flush=True,
            )
        print(f"{'ratio':>10} {rates['observed'] / rates['sglang']:>18.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
