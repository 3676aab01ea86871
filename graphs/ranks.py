"""An executor over several ranks: the same commands, in one order, in every process.

Knows commands, reports and times; never a stream's bytes, a model or a request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial

from treadle.graphs.buckets import GraphKey
from treadle.graphs.command_codec import (
    Capture,
    Command,
    Discard,
    Release,
    Resume,
    Sampling,
    digest,
    encode,
)
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.followers import Team
from treadle.graphs.handles import DeviceHandle, end
from treadle.graphs.peer import RankError, Report
from treadle.graphs.step import Capacity, GraphReport, Int64s, MemoryTag, Step
from treadle.graphs.watchdog import Watchdog, describe

logger = logging.getLogger("treadle")


class RankedExecutor:
    """Implements `Executor`: rank 0's own device here, the other ranks behind a team.

    Rank 0 decides everything: the order, each step's shape, which graphs there are.
    """

    def __init__(self, local: DeviceExecutor, team: Team, watchdog_timeout_s: float) -> None:
        """local: not started. team: all its ranks are ready."""
        self._local = local
        self._team = team
        lead = _Lead(local, team, watchdog_timeout_s)
        local.lead(lead)
        local.capture.request = lead.request_capture
        team.observe(lead)
        local.start()

    @property
    def capacity(self) -> Capacity:
        return self._local.capacity

    @property
    def depth(self) -> int:
        return self._local.depth

    @property
    def is_stuck(self) -> bool:
        """Whether something is left that an orderly exit of the process could wait for forever."""
        return self._local.is_stuck or self._local.loss is not None

    def launch(self, step: Step) -> DeviceHandle:
        return self._local.launch(step)

    def prepare(self, all_graphs: bool) -> None:
        """Captures on all ranks: the largest decode bucket, or everything. Blocks.

        Raises: RankError.
        """
        self._local.prepare(all_graphs)

    async def release(self, tags: Collection[MemoryTag]) -> None:
        await self._local.release(tags)

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        await self._local.resume(tags)

    def graphs(self) -> GraphReport:
        return self._local.graphs()

    def is_alive(self) -> bool:
        return self._local.is_alive()

    async def close(self) -> None:
        """Bounded in time, also when a rank hangs."""
        if self._local.loss is not None:  # frees what waits for the others, where that is possible
            await asyncio.to_thread(self._team.close, at_once=True)
        await self._local.close()
        await asyncio.to_thread(self._team.close)


class _Lead:
    """What rank 0 does for the others: sends on, listens, watches."""

    def __init__(self, local: DeviceExecutor, team: Team, watchdog_timeout_s: float) -> None:
        self._local = local
        self._team = team
        self._watchdog = Watchdog(watchdog_timeout_s)
        self._answers = _Answers(team.ranks)
        self._agreement = _Agreement(len(team.ranks) + 1) if team.plan.is_debug else None

    def send(self, command: Command) -> Future[None] | None:
        """Called by the local executor, in the commands' order."""
        answers = None
        match command:
            case Step():
                self._watchdog.launched(command)
            case Sampling(seq):
                self._watchdog.sampling(seq)
            case Capture() | Release() | Resume():
                answers = self._answers.expect()
        self._team.send(encode(command))
        return answers

    def step_finished(self, step: Step, tokens: Int64s) -> None:
        self._watchdog.finished(step.seq)
        if self._agreement is not None:
            self._compare(0, step.seq, digest(step, tokens))

    def step_failed(self, seq: int, error: Exception) -> None:
        self._team.fail(0, f"step {seq} failed: {type(error).__name__}: {error}")

    def reported(self, rank: int, report: Report) -> None:
        if report.what == "answer":
            self._answers.take(rank, report.text)
        elif report.what == "finished":
            self._compare(rank, *report.numbers)

    def tick(self) -> None:
        """Looks for ranks that hang."""
        silent = [
            f"rank {rank} has not been heard of for {silence:.1f} s"
            for rank in self._team.ranks
            if (silence := self._team.progress(rank)[2]) > self._patience_s
        ]
        hang = self._watchdog.overdue()
        if hang is not None:
            self._team.fail(None, f"{hang}; {self._who_lags()}")
        elif silent:
            self._team.fail(None, "; ".join(silent))

    def lost(self, error: RankError) -> None:
        step = self._watchdog.oldest()
        what = "while idle" if step is None else f"at {describe(step)}"
        logger.critical("The engine is lost %s: %s", what, error)
        told = RankError(f"{error} ({what})")
        self._answers.fail(told)
        self._local.lose(told)

    @property
    def _patience_s(self) -> float:
        return max(self._watchdog.timeout_s, 3 * self._team.plan.heartbeat_s)

    def _who_lags(self) -> str:
        step = self._watchdog.oldest()
        words = []
        for rank in self._team.ranks:
            started, finished, silence = self._team.progress(rank)
            if step is None or finished < step.seq:
                words.append(
                    f"rank {rank} has started step {started}, finished step {finished} and was "
                    f"heard of {silence:.1f} s ago"
                )
        return "; ".join(words) or "only rank 0 has not finished it"

    def _compare(self, rank: int, seq: int, value: int) -> None:
        assert self._agreement is not None
        if not self._agreement.take(rank, seq, value):
            self._team.fail(rank, f"step {seq}: plan or tokens differ from another rank's")

    def request_capture(self, key: GraphKey) -> None:
        """Has all ranks capture a key; steps use it once all of them have."""
        local = self._local
        with local.commands.order:
            if local.loss is not None:  # nobody would say that it is settled
                return
            if not local.may_capture or not local.capture.begin(key):
                return
            local.capture.is_settled.clear()
            done = local.commands.call(partial(local.capture.run, key), Capture(key))
        done.add_done_callback(partial(self._settle, key))

    def _settle(self, key: GraphKey, done: Future[None]) -> None:
        error, capture = done.exception(), self._local.capture

        def settle() -> None:
            capture.settle(key, error)
            capture.is_settled.set()

        self._local.commands.call(settle, None if error is None else Discard(key))


class _Answers:
    """Pairs answers with commands: every rank answers in the commands' order."""

    def __init__(self, ranks: Collection[int]) -> None:
        self._waiting: dict[int, deque[Future[None]]] = {rank: deque() for rank in ranks}
        self._missing: dict[Future[None], int] = {}
        self._errors: dict[Future[None], str] = {}
        self._loss: Exception | None = None
        self._lock = threading.Lock()

    def expect(self) -> Future[None]:
        """Ends when all ranks have answered, with the first error."""
        done: Future[None] = Future()
        with self._lock:
            self._missing[done] = len(self._waiting)
            for waiting in self._waiting.values():
                waiting.append(done)
            loss = self._loss
        if loss is not None:
            end(done, loss)
        return done

    def take(self, rank: int, error: str) -> None:
        with self._lock:
            done = self._waiting[rank].popleft()
            self._missing[done] -= 1
            if error:
                self._errors.setdefault(done, f"rank {rank}: {error}")
            if self._missing[done]:
                return
            del self._missing[done]
            text = self._errors.pop(done, None)
        end(done, None if text is None else RuntimeError(text))

    def fail(self, error: Exception) -> None:
        with self._lock:
            self._loss = error
            waiting = list(self._missing)
        for done in waiting:
            end(done, error)


class _Agreement:
    """Whether all ranks say the same of each step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._said: dict[int, dict[int, int]] = {}  # by seq and rank
        self._lock = threading.Lock()

    def take(self, rank: int, seq: int, value: int) -> bool:
        with self._lock:
            said = self._said.setdefault(seq, {})
            said[rank] = value
            if len(said) == self._size:
                del self._said[seq]
            return len(set(said.values())) == 1
