"""Runs a section in a child process within a time limit, and accounts for every unit.

Knows processes and lines; never what is measured. A unit that kills its process or takes too long
becomes a row that says so; what comes after a crash runs in a fresh process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import IO, Any

from treadle.perf.gpu.sections import Row, Section, Setting

Emit = Callable[[Row], None]


@dataclass(slots=True)
class _Progress:
    """What is known of a section's units."""

    done: set[str]
    planned: list[str] | None = None  # None: the process has not come so far
    running: str | None = None

    @property
    def left(self) -> list[str]:
        return [name for name in self.planned or [] if name not in self.done]


@dataclass(slots=True)
class Supervisor:
    """Rows go to `emit` as they come."""

    setting: Setting
    emit: Emit
    command: list[str] = field(
        default_factory=lambda: [sys.executable, "-m", "treadle.perf.gpu_check", "--child"]
    )

    def run(self, section: Section, done: Collection[str], limit_s: float) -> None:
        """done: units that need no measuring."""
        deadline = time.monotonic() + limit_s
        progress = _Progress(set(done))
        while True:
            before = len(progress.done)
            status = self._run_once(section, progress, deadline)
            if status is None:
                self._give_up(section, progress, f"not done within {limit_s:.0f} s")
                return
            reason = f"its process ended with {_ending(status)}; stderr says more"
            blamed = progress.running or ("start" if progress.planned is None else None)
            if status and blamed is not None:
                self._settle(section, progress, Row(section.name, blamed, {}, 0.0, reason, True))
            if not progress.left:
                return
            if len(progress.done) == before:
                self._give_up(section, progress, f"left when {reason}")
                return

    def _run_once(self, section: Section, progress: _Progress, deadline: float) -> int | None:
        """The exit status; None when time is over. Every process that it started has ended."""
        arguments = [*self.command, section.name]
        if self.setting.is_tiny:
            arguments.append("--rehearse")
        progress.planned = progress.running = None
        with subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        ) as child:  # fmt: skip
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(json.dumps(sorted(progress.done)))
                child.stdin.close()
            except BrokenPipeError:
                pass  # its status tells
            try:
                if self._listen(section, progress, child.stdout, deadline):
                    return child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        return None

    def _listen(
        self, section: Section, progress: _Progress, stream: IO[str], deadline: float
    ) -> bool:
        """Until the stream ends; False when time is over first."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            for text in stream:
                lines.put(text)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                text = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if not text:
                return True
            self._take(section, progress, json.loads(text))

    def _take(self, section: Section, progress: _Progress, message: dict[str, Any]) -> None:
        if "plan" in message:
            progress.planned = message["plan"]
        elif "begin" in message:
            progress.running = message["begin"]
        else:
            self._settle(section, progress, Row(**message["row"]))

    def _settle(self, section: Section, progress: _Progress, row: Row) -> None:
        progress.done.add(row.name)
        progress.running = None
        self.emit(row)

    def _give_up(self, section: Section, progress: _Progress, reason: str) -> None:
        running = progress.running
        for name in progress.left if progress.planned is not None else ["start"]:
            is_cause = name == running
            text = reason if is_cause else f"not reached: the section was {reason}"
            self.emit(Row(section.name, name, {}, 0.0, text, is_cause))


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
