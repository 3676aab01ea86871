"""Where the time until readiness went, by phase; the phases add up to the whole.

Knows clocks and names of phases; never what a phase does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Literal

import psutil

from treadle.engine.info import EngineInfo

logger = logging.getLogger("treadle")

Phase = Literal["imports", "description", "tokenizer", "ranks", "weights", "kv_memory", "graphs"]
PHASES: tuple[Phase, ...] = (
    "imports", "description", "tokenizer", "ranks", "weights", "kv_memory", "graphs",
)  # fmt: skip
_START_TIME_FIELD = 19  # of /proc/self/stat, counted behind the command's name


class Startup:
    """A start-up that is going on. Phases follow each other, on whatever thread."""

    def __init__(self, since: float) -> None:
        """since: when it began, on the clock of `time.perf_counter`."""
        self._since = since
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Time inside belongs to the phase; a phase may come again, but not inside another."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, started)

    def add(self, name: Phase, started: float) -> None:
        """Everything since `started` belongs to the phase."""
        self._seconds[name] += time.perf_counter() - started

    def finish(self, info: EngineInfo) -> EngineInfo:
        """Logs the report; returns what the engine says of itself, with the report in it."""
        total = time.perf_counter() - self._since
        other = total - sum(self._seconds.values())
        rows = in_hundredths({**self._seconds, "other": other})
        info = replace(info, startup_s=rows)
        terms = " + ".join(f"{name.replace('kv_m', 'KV m')} {s:.2f}" for name, s in rows.items())
        logger.info("Start-up took %.2f s: %s", info.startup_time, terms)
        return info


CURRENT: ContextVar[Startup | None] = ContextVar("startup", default=None)
"""The start-up that composing an engine is a part of; whoever sets it finishes it."""


def own_process() -> Startup:
    """For a process that is Treadle's alone: its start-up began with the process.

    What composes an engine in this context, or in a task or thread begun from it, adds its phases.
    """
    begun = time.perf_counter() - process_age_s()
    startup = Startup(begun)
    startup.add("imports", begun)
    CURRENT.set(startup)
    return startup


def process_age_s() -> float:
    """Seconds since this process was made (an `exec` does not begin it anew).

    On Linux to half a tick of the kernel's accounting, 5 ms: both times count from boot, in the
    process's own time namespace. psutil's `create_time` goes through the boot time in whole
    seconds there, and is off by up to one; elsewhere it is as exact as the system.
    """
    try:
        stat = Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])
        made = (ticks + 0.5) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - made)
    except (OSError, AttributeError):
        return max(0.0, time.time() - float(psutil.Process().create_time()))


def in_hundredths(rows: Mapping[str, float]) -> dict[str, float]:
    """Each row rounded down or up so that all add up to their rounded sum."""
    exact = {name: 100 * max(0.0, seconds) for name, seconds in rows.items()}
    whole = {name: int(amount) for name, amount in exact.items()}
    missing = round(sum(exact.values())) - sum(whole.values())
    for name in sorted(exact, key=lambda name: whole[name] - exact[name])[:missing]:
        whole[name] += 1
    return {name: amount / 100 for name, amount in whole.items()}
