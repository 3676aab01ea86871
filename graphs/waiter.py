"""Waits for steps' tokens, on a thread of its own, and hands them on.

Knows events and results; never the commands' order or who awaits a step.

Axes: R rows of a plan, N rows that sample.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from treadle.graphs.device import Event
from treadle.graphs.handles import DeviceHandle
from treadle.graphs.runner import Forwarded
from treadle.graphs.step import Int64s, StepResult


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose last device work is queued."""

    handle: DeviceHandle
    event: Event
    forwarded: Forwarded
    started: float


class Waiter:
    """Takes launched steps in their order."""

    def __init__(
        self,
        take: Callable[[int, Forwarded], Int64s],
        report: Callable[[DeviceHandle, StepResult, Int64s], None],
        fail: Callable[[DeviceHandle, Exception], None],
    ) -> None:
        """take: a step's sampled tokens [N], once its event has passed."""
        self._take = take
        self._report = report
        self._fail = fail
        self._launched: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()

    def put(self, launched: Launched | None) -> None:
        """None ends `run` after what was put before."""
        self._launched.put(launched)

    def run(self) -> None:
        while (launched := self._launched.get()) is not None:
            try:
                launched.event.wait()
                sampled = self._take(launched.handle.seq, launched.forwarded)
                self._report(launched.handle, _result(launched, sampled), sampled)
            except Exception as error:
                self._fail(launched.handle, error)


def _result(launched: Launched, sampled: Int64s) -> StepResult:
    """sampled: [N] tokens of the rows that sample."""
    step = launched.handle.step
    tokens = np.zeros((step.plan.num_rows, 1), dtype=np.int32)
    tokens[step.plan.samples, 0] = sampled
    elapsed_ms = (time.perf_counter() - launched.started) * 1e3
    accepted = step.plan.samples.astype(np.int32)
    replayed = step.choice is not None and step.choice.replays
    return StepResult(step.seq, tokens, accepted, elapsed_ms, replayed)
