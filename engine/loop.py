"""The overlap loop: plan and launch step n+1 while step n runs, then write out step n-1.

Knows the order of work, nothing about policies, text or devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from treadle.engine.outbox import Outbox
from treadle.engine.planner import Launch
from treadle.engine.scheduler import Scheduler
from treadle.graphs.step import Executor, StepHandle, StepResult

logger = logging.getLogger(__name__)

STUCK_S = 0.05  # between two attempts to plan when work waits and nothing is in flight
WATCH_S = 1.0  # a loop without work looks this often whether the device lives
OUTPUT_SLICE_S = 0.001  # output yields to a pending completion this often


class Loop:
    """Drives one scheduler and one executor until it is closed and idle."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        outbox: Outbox,
        on_step: Callable[[Launch, StepResult], None],
        depth: int,
    ) -> None:
        """on_step: told of every finished step, for logs and metrics.
        depth: steps in flight, at most the executor's.
        """
        self.heartbeat = 0  # turns taken
        self.error: str | None = None  # how the device was lost
        self.lost = asyncio.Event()
        self._scheduler = scheduler
        self._executor = executor
        self._outbox = outbox
        self._on_step = on_step
        self._depth = depth
        self._in_flight: deque[tuple[Launch, StepHandle]] = deque()
        self._wake = asyncio.Event()
        self._is_closed = False
        self._is_held = False
        self._is_waiting = False  # for the oldest step in flight

    def wake(self) -> None:
        """Something changed: a request came, was aborted, or the loop is to close."""
        self._wake.set()

    def close(self) -> None:
        """Ends `run` once nothing is waiting, running or in flight."""
        self._is_closed = True
        self.wake()

    async def hold(self) -> None:
        """Launches nothing from now on; returns when no step is in flight.

        Requests come, wait and can be aborted; what runs neither goes on nor ends.
        """
        self._is_held = True
        while self._in_flight or self._is_waiting:
            await asyncio.sleep(0.001)

    def go_on(self) -> None:
        """Ends `hold`."""
        self._is_held = False
        self.wake()

    def check_device(self, error: Exception | None = None) -> None:
        """Ends every request when the device no longer lives.

        error: what made somebody ask.
        """
        if self.error is None and not self._executor.is_alive():
            self.error = f"the device is lost: {error or 'it takes no more commands'}"
            self._outbox.put(self._scheduler.fail_all(self.error, 503))
            self.lost.set()
            self.wake()

    async def takes_turns(self, timeout: float) -> bool:
        """Whether the loop takes a turn within `timeout` seconds, or waits for a step.

        A step may take long (a prefill on a host takes seconds) and is no reason for alarm.
        """
        before = self.heartbeat
        self.wake()
        deadline = asyncio.get_running_loop().time() + timeout
        while self.heartbeat == before and not self._in_flight and not self._is_waiting:
            if self.error is not None or asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True

    async def wait_idle(self, timeout: float) -> bool:
        """Whether nothing waits, runs or is in flight, within `timeout` seconds.

        With nothing queued only a step in flight is waited for, and that takes no patience.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        while not self._scheduler.is_idle:
            if self._scheduler.has_work and asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.002)
        return True

    async def run(self) -> None:
        while True:
            self.heartbeat += 1
            try:
                self._outbox.put(self._scheduler.reap())
                self._launch()
                await self._write_out()
                if self._in_flight:
                    await self._finish_oldest()
                    continue
            except Exception:
                logger.exception("A scheduling turn failed; its requests are ended")
                self._outbox.put(self._scheduler.fail_all("internal error", 500))
            if self._is_closed and not self._scheduler.has_work and not self._outbox:
                return
            if not self._outbox and not self._in_flight:
                self._scheduler.heal_when_idle()
                await self._sleep()

    async def _sleep(self) -> None:
        """Until something changes; with work that could not be planned, for a moment at most."""
        is_stuck = self._scheduler.has_work and self._may_launch
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), STUCK_S if is_stuck else WATCH_S)
        self._wake.clear()
        self.check_device()

    @property
    def _may_launch(self) -> bool:
        return self.error is None and not self._is_held

    def _launch(self) -> None:
        while len(self._in_flight) < self._depth and self._may_launch:
            launch = self._scheduler.schedule()
            if launch is None:
                return
            try:
                handle = self._executor.launch(launch.step)
            except Exception as error:
                self._fail(launch, error)
            else:
                self._in_flight.append((launch, handle))

    async def _write_out(self) -> None:
        await asyncio.sleep(0)
        while self._outbox:
            self._outbox.deliver(OUTPUT_SLICE_S)
            await asyncio.sleep(0)
            if self._in_flight and self._in_flight[0][1].done():
                return

    async def _finish_oldest(self) -> None:
        launch, handle = self._in_flight.popleft()
        self._is_waiting = True
        try:
            result = await handle
        except Exception as error:
            self._fail(launch, error)
        else:
            self._outbox.put(self._scheduler.update(launch, result))
            self._on_step(launch, result)
        finally:
            self._is_waiting = False

    def _fail(self, launch: Launch, error: Exception) -> None:
        logger.error("Step %d failed", launch.step.seq, exc_info=error)
        self._outbox.put(self._scheduler.fail(launch, f"the step failed: {error}"))
        self.check_device(error)
