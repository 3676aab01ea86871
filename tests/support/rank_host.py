"""Engines over several processes on small random models, with ranks that fail when told to.

Run as a program it is a worker: `TREADLE_TEST_FAULT` is `rank:seq:what`, with what one of
raise, exit, kill, hang, stop, wrong; `rank:load:reason` fails while it loads, `rank:capture:` when
it captures, `rank:resume:reason` when it first takes memory again; `rank:stops:load` and
`rank:stops:allocate` stop the process there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from plan_host import Host

from treadle.graphs.backends import CaptureError
from treadle.graphs.buckets import Buckets
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.followers import Team
from treadle.graphs.handles import DeviceHandle
from treadle.graphs.rank_main import leave, main
from treadle.graphs.rank_model import ModelRank, Rank
from treadle.graphs.rank_plan import Allocation, Layout, RankPlan
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.step import Step
from treadle.graphs.weights.load import CheckpointError

FAULT = "TREADLE_TEST_FAULT"
WORKER = (sys.executable, __file__)
VOCAB = 300
CONTEXT = 512  # tokens
PAGE_SIZE = 4
NO_BUCKETS = Buckets((), ())


def write_model(folder: Path, kv_heads: int = 2) -> Path:
    """A folder whose weights are drawn at random when they are loaded as dummy."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": kv_heads, "head_dim": 16, "intermediate_size": 96,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT, "torch_dtype": "float32",
        "tie_word_embeddings": False,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def a_plan(folder: Path, size: int, **changes: object) -> RankPlan:
    values: dict[str, object] = {
        "rank": 0, "size": size, "device": "cpu", "store": "", "model_path": str(folder),
        "load_format": "dummy", "dtype": "float32", "max_model_len": CONTEXT, "num_threads": 1,
        "timeout_s": 60.0, "heartbeat_s": 0.2, "log_level": "warning",
    }  # fmt: skip
    return RankPlan(**(values | changes))  # type: ignore[arg-type]


def an_allocation(slots: int, buckets: Buckets = NO_BUCKETS) -> Allocation:
    return Allocation(
        page_size=PAGE_SIZE, pages=slots * (-(-CONTEXT // PAGE_SIZE)), slots=slots,
        max_model_len=CONTEXT, vocab_size=VOCAB, depth=2, decode_rows=buckets.decode_rows,
        prefill_tokens=buckets.prefill_tokens,
    )  # fmt: skip


class RankedHost(Host):
    """A scheduler for a few rows of an engine over several ranks, or of one rank alone."""

    def __init__(self, executor: DeviceExecutor | RankedExecutor, slots: int) -> None:
        self.ranked = executor
        self.page_size = PAGE_SIZE
        self.seq = 0
        self.length = [0] * slots
        width = -(-CONTEXT // PAGE_SIZE)
        pages = random.Random(0).sample(range(slots * width), slots * width)
        self.pages = [pages[slot * width : (slot + 1) * width] for slot in range(slots)]

    async def tokens(self, steps: Sequence[Step]) -> list[list[int]]:
        """Of each step, launched as the depth allows."""
        handles: list[DeviceHandle] = []
        found: list[list[int]] = []
        for step in steps:
            if len(handles) == self.ranked.depth:
                found.append((await handles.pop(0)).token_ids[:, 0].tolist())
            handles.append(self.ranked.launch(step))
        found += [(await handle).token_ids[:, 0].tolist() for handle in handles]
        return found


def start(
    plan: RankPlan,
    *,
    slots: int = 4,
    buckets: Buckets = NO_BUCKETS,
    watchdog_s: float = 60.0,
    fault: str | None = None,
    layout: Layout | None = None,
) -> tuple[RankedHost, RankedExecutor, Team]:
    """Rank 0 here, the others as processes."""
    with _environment({} if fault is None else {FAULT: fault}):
        team = Team(layout or Layout(plan.size), plan, "cpu", WORKER)
    try:
        rank = ModelRank(team.plan, team.group)
        assert team.wait_loaded() > 0
        allocation = an_allocation(slots, buckets)
        team.allocate(allocation)
        executor = RankedExecutor(rank.allocate(allocation), team, watchdog_s)
    except BaseException:
        team.close(at_once=True)
        raise
    return RankedHost(executor, slots), executor, team


def alone(folder: Path, slots: int = 4, buckets: Buckets = NO_BUCKETS) -> RankedHost:
    """The same model on one rank."""
    executor = ModelRank(a_plan(folder, 1), None).allocate(an_allocation(slots, buckets))
    executor.start()
    return RankedHost(executor, slots)


def fail_once(executor: DeviceExecutor, reason: str) -> None:
    """The executor's memory does not come back the first time."""
    occupation = executor.occupation
    assert occupation is not None
    resume = occupation.resume

    def fail(tags: object) -> None:
        occupation.resume = resume  # type: ignore[method-assign]
        raise CheckpointError(reason)

    occupation.resume = fail  # type: ignore[method-assign]


class _environment:  # noqa: N801
    def __init__(self, changes: Mapping[str, str]) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._changes}
        os.environ.update(self._changes)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Faulty:
    """A rank that does as TREADLE_TEST_FAULT says."""

    def __init__(self, plan: RankPlan, group: dist.ProcessGroup) -> None:
        rank, self._when, self._what = (os.environ.get(FAULT) or "-1::").split(":", 2)
        self._is_faulty = rank in (str(plan.rank), "all")
        if self._is_faulty and self._when == "load":
            raise ValueError(self._what)
        self._stop_at("load")
        self._rank = ModelRank(plan, group)

    def free_bytes(self) -> int:
        return self._rank.free_bytes()

    def allocate(self, allocation: Allocation) -> DeviceExecutor:
        self._stop_at("allocate")
        executor = self._rank.allocate(allocation)
        runner, forward = executor.runner, executor.runner.forward
        if self._is_faulty and self._when == "capture":

            def refuse(key: object) -> None:
                raise CaptureError("out of luck")

            runner.graphs.capture = refuse  # type: ignore[method-assign]
        elif self._is_faulty and self._when == "resume":
            fail_once(executor, self._what)
        elif self._is_faulty:

            def faulty(step: Step):  # type: ignore[no-untyped-def]
                if step.seq == int(self._when):
                    self._fail(step)
                return forward(step)

            runner.forward = faulty  # type: ignore[method-assign]
        return executor

    def _stop_at(self, place: str) -> None:
        if self._is_faulty and (self._when, self._what) == ("stops", place):
            os.kill(os.getpid(), signal.SIGSTOP)

    def _fail(self, step: Step) -> None:
        match self._what:
            case "raise":
                raise ValueError("out of luck")
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "wrong":
                step.plan.epoch[:] += 1


def _load(plan: RankPlan, group: dist.ProcessGroup) -> Rank:
    return _Faulty(plan, group)


if __name__ == "__main__":
    leave(main(load=_load))
