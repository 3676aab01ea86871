"""How long a step may take, and what is said about one that takes longer.

Knows plans by mode, rows and tokens, and times; never a process, a socket or a device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from treadle.graphs.step import Step

GENEROUS = 10.0  # times the expected time
UNKNOWN_S = 0.01  # per token, until the first step has shown better
_FORGET = 0.9  # of the slowest pace remains with each step


@dataclass(slots=True)
class _Running:
    step: Step
    since: float
    waits: bool  # for its mask, which is not the device's time


class Watchdog:
    """Holds the oldest step in flight against what steps of its size have taken."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """timeout_s: patience beyond the expected time."""
        self.timeout_s = timeout_s
        self._clock = clock
        self._running: dict[int, _Running] = {}  # by seq, in order
        self._pace: dict[str, float] = {}  # seconds per token, by mode; the slowest of late
        self._lock = threading.Lock()

    def launched(self, step: Step) -> None:
        with self._lock:
            self._running[step.seq] = _Running(step, self._clock(), step.plan.is_constrained)

    def sampling(self, seq: int) -> None:
        """A constrained step has its mask."""
        with self._lock:
            if (running := self._running.get(seq)) is not None:
                running.waits, running.since = False, self._clock()

    def finished(self, seq: int) -> None:
        with self._lock:
            running = self._running.pop(seq, None)
            if running is None:
                return
            now, plan = self._clock(), running.step.plan
            pace = (now - running.since) / max(plan.num_tokens, 1)
            self._pace[plan.mode] = max(pace, _FORGET * self._pace.get(plan.mode, 0.0))
            for following in self._running.values():
                following.since = max(following.since, now)

    def expected_s(self, step: Step) -> float:
        pace = self._pace.get(step.plan.mode, UNKNOWN_S)
        return GENEROUS * pace * max(step.plan.num_tokens, 1)

    def oldest(self) -> Step | None:
        with self._lock:
            return next((each.step for each in self._running.values()), None)

    def overdue(self) -> str | None:
        """What hangs, or None."""
        with self._lock:
            running = next(iter(self._running.values()), None)
            if running is None or running.waits:
                return None
            elapsed, expected = self._clock() - running.since, self.expected_s(running.step)
        if elapsed <= self.timeout_s + expected:
            return None
        return (
            f"{describe(running.step)} has been running for {elapsed:.1f} s, expected were "
            f"{expected:.1f} s and --watchdog-timeout is {self.timeout_s:g} s"
        )


def describe(step: Step) -> str:
    plan = step.plan
    return f"step {step.seq} ({plan.mode}, {plan.num_rows} rows, {plan.num_tokens} tokens)"
