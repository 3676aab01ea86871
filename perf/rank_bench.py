"""What it costs to bring a step to another rank: from `launch` to the start of its forward.

`python -m treadle.perf.rank_bench` prints p50 and p99 in microseconds at several numbers of
requests, for two ranks that compute nothing, each on a core of its own where there are two. Both
read the same monotonic clock. `paced` steps come to a rank that sleeps, `piped` ones while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from treadle.graphs.backends import Eager
from treadle.graphs.capture import BackgroundCapture, GraphTable
from treadle.graphs.device import Event, HostDevice
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.followers import Team
from treadle.graphs.rank_main import leave, main
from treadle.graphs.rank_model import Rank
from treadle.graphs.rank_plan import Allocation, Layout, RankPlan
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.runner import Forwarded, Runner
from treadle.graphs.step import Bools, Capacity, Int64s, SamplingBatch, Step, StepPlan

DEPTH = 2
PACE_S = 0.001  # between paced steps
STEP_S = 0.0005  # that a piped step keeps rank 0


class NullRunner:
    """Takes the time at which each step begins, and nothing else."""

    def __init__(self, capacity: Capacity, buckets: Any, step_s: float = 0.0) -> None:
        self.capacity = capacity
        self.graphs = GraphTable(Eager(), buckets, lambda key: (), lambda: None)
        self.step_s = step_s
        self.starts: dict[int, int] = {}  # nanoseconds, by seq
        self._device = HostDevice()

    def forward(self, step: Step) -> Forwarded:
        self.starts[step.seq] = time.monotonic_ns()
        if self.step_s:
            time.sleep(self.step_s)
        return cast(Forwarded, step.plan.num_rows)

    def sample(self, step: Step, forwarded: Forwarded, mask: Bools | None) -> Event:
        return self._device.record()

    def take(self, seq: int, forwarded: Forwarded) -> Int64s:
        return np.zeros(cast(int, forwarded), dtype=np.int64)


class NullRank:
    def free_bytes(self) -> int:
        return 1

    def allocate(self, allocation: Allocation) -> DeviceExecutor:
        capacity = Capacity((), allocation.slots, allocation.max_model_len, allocation.vocab_size)
        self.runner = NullRunner(capacity, allocation.buckets)
        capture = BackgroundCapture(self.runner.graphs, 0.0, None, in_background=False)
        return DeviceExecutor(cast(Runner, self.runner), HostDevice(), allocation.depth, capture)


def a_step(seq: int, rows: int) -> Step:
    slots = np.arange(rows, dtype=np.int32)
    trues = np.ones(rows, dtype=np.bool_)
    plan = StepPlan(
        mode="decode", req_slot=slots, epoch=slots, q_len=np.ones(rows, dtype=np.int32),
        from_host=~trues, max_len=slots + 900, samples=trues,
        token_ids=np.zeros(0, dtype=np.int32), page_updates={}, slot_init=None,
        sampling=SamplingBatch(np.zeros(rows, dtype=np.float32), True),
    )  # fmt: skip
    return Step(seq, (plan,))


async def run(rows: int, steps: int, piped: bool) -> list[float]:
    """Microseconds from launch to the other rank's start, of each step."""
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder) / "stamps.npy"
        command = (sys.executable, "-m", "treadle.perf.rank_bench", "--stamps", str(stamps))
        plan = RankPlan(0, 2, "cpu", "", "", "", "", 1024)
        team = Team(Layout(2), plan, "cpu", command)
        team.wait_loaded()
        allocation = Allocation(1, 1, rows, 1024, 8, DEPTH)
        team.allocate(allocation)
        rank = NullRank()
        executor = RankedExecutor(rank.allocate(allocation), team, 60.0)
        rank.runner.step_s = STEP_S if piped else 0.0
        launched: dict[int, int] = {}
        waiting: list[Any] = []
        for seq in range(1, steps + 1):
            step = a_step(seq, rows)
            launched[seq] = time.monotonic_ns()
            waiting.append(executor.launch(step))
            if not piped or len(waiting) == DEPTH:
                await waiting.pop(0)
            if not piped:
                await asyncio.sleep(PACE_S)
        for handle in waiting:
            await handle
        await executor.close()
        found = dict(np.load(stamps).tolist())
    return [(found[seq] - launched[seq]) / 1e3 for seq in range(steps // 10, steps + 1)]


def pin(core: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


def follow(stamps: Path, rest: Sequence[str]) -> int:
    pin(1)
    ranks: list[NullRank] = []

    def load(plan: RankPlan, group: dist.ProcessGroup) -> Rank:
        ranks.append(NullRank())
        return ranks[0]

    code = main(rest, load)
    np.save(stamps, np.array(list(ranks[0].runner.starts.items())))
    return code


def bench() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--stamps", type=Path, help="for the other rank")
    options, rest = parser.parse_known_args()
    if options.stamps is not None:
        leave(follow(options.stamps, rest))
    cores = os.sched_getaffinity(0)
    print(f"{len(cores)} cores, {options.steps} steps, us")
    for rows in options.requests:
        for piped in (False, True):
            os.sched_setaffinity(0, cores)
            spent = asyncio.run(_pinned(rows, options.steps, piped))
            quantiles = statistics.quantiles(spent, n=100)
            name = "piped" if piped else "paced"
            print(f"{rows:4d} requests {name}: p50 {quantiles[49]:7.1f}  p99 {quantiles[98]:7.1f}")


async def _pinned(rows: int, steps: int, piped: bool) -> list[float]:
    pin(0)
    return await run(rows, steps, piped)


if __name__ == "__main__":
    bench()
