"""Runs steps on one device: a launch thread consumes them in order, a waiter reports them.

Knows plans, slots and tensors; never a request. The event loop's thread only queues commands.

Axes: R rows, T tokens, N rows that sample.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.graphs.device import Device, Event
from treadle.graphs.runner import Forwarded, Runner
from treadle.graphs.step import Bools, Capacity, Step, StepResult

logger = logging.getLogger(__name__)


class DeviceHandle:
    """A launched step. Created and awaited on the event loop's thread."""

    def __init__(self, executor: DeviceExecutor, step: Step) -> None:
        self.seq = step.seq
        self.step = step
        self.needs_mask = step.plan.is_constrained
        self._executor = executor
        self._future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return self._future.done()

    def sample(self, mask: Bools | None) -> None:
        if not self.needs_mask:
            raise RuntimeError(f"step {self.seq} waits for no mask")
        self.needs_mask = False
        self._executor.queue_sampling(self, mask)

    def __await__(self) -> Generator[Any, None, StepResult]:
        return asyncio.shield(self._future).__await__()

    def post(self, result: StepResult | Exception) -> None:
        """From the waiter or the launch thread: wakes whoever awaits the handle."""
        try:
            self._future.get_loop().call_soon_threadsafe(self._resolve, result)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("Step %d ended after its event loop", self.seq)

    def _resolve(self, result: StepResult | Exception) -> None:
        if self._future.done():
            return
        if isinstance(result, Exception):
            self._future.set_exception(result)
            self._future.exception()  # read here: a handle may be dropped without being awaited
        else:
            self._future.set_result(result)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Command: finish a step whose forward has run, now that its mask is known."""

    handle: DeviceHandle
    mask: Bools | None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose last device work is queued."""

    handle: DeviceHandle
    event: Event
    forwarded: Forwarded
    started: float


class DeviceExecutor:
    """Implements `Executor` for CUDA and the host."""

    def __init__(self, runner: Runner, device: Device, depth: int = 2) -> None:
        self.depth = depth
        self._runner = runner
        self._device = device
        self._in_flight: list[DeviceHandle] = []
        self._next_seq = 1
        self._forwarded: dict[int, tuple[Forwarded, float]] = {}  # constrained, not yet sampled
        self._commands: queue.SimpleQueue[DeviceHandle | _Sampling | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch_loop, name="treadle-launch", daemon=True),
            threading.Thread(target=self._wait_loop, name="treadle-wait", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        # a thread inside torch while the interpreter goes down would abort the process
        atexit.register(self._stop)

    @property
    def capacity(self) -> Capacity:
        return self._runner.capacity

    def launch(self, step: Step) -> DeviceHandle:
        self._in_flight = [handle for handle in self._in_flight if not handle.done()]
        if not self.is_alive():
            raise RuntimeError("the executor is closed or its launch thread has died")
        if step.seq != self._next_seq:
            raise RuntimeError(f"step {step.seq} launched, {self._next_seq} is next")
        if len(self._in_flight) >= self.depth:
            raise RuntimeError(f"{self.depth} steps are in flight already")
        if self._in_flight and self._in_flight[-1].needs_mask:
            raise RuntimeError(f"step {self._in_flight[-1].seq} still waits for its mask")
        self._next_seq += 1
        handle = DeviceHandle(self, step)
        self._in_flight.append(handle)
        self._commands.put(handle)
        return handle

    def queue_sampling(self, handle: DeviceHandle, mask: Bools | None) -> None:
        """Called by the handle, once."""
        self._commands.put(_Sampling(handle, mask))

    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    async def close(self) -> None:
        atexit.unregister(self._stop)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """Ends the threads after what is queued."""
        self._commands.put(None)
        for thread in self._threads:
            thread.join()

    def _launch_loop(self) -> None:
        self._device.enter_thread()
        while (command := self._commands.get()) is not None:
            handle = command.handle if isinstance(command, _Sampling) else command
            try:
                if isinstance(command, _Sampling):
                    self._sample(command)
                else:
                    self._forward(command)
            except Exception as error:
                self._forwarded.pop(handle.seq, None)
                handle.post(error)
        self._launched.put(None)

    def _forward(self, handle: DeviceHandle) -> None:
        started = time.perf_counter()
        forwarded = self._runner.forward(handle.step)
        if handle.step.plan.is_constrained:
            self._forwarded[handle.seq] = (forwarded, started)
        else:
            self._finish(handle, forwarded, started, None)

    def _sample(self, command: _Sampling) -> None:
        entry = self._forwarded.pop(command.handle.seq, None)
        if entry is not None:  # else the forward raised, and the handle knows
            self._finish(command.handle, *entry, command.mask)

    def _finish(
        self, handle: DeviceHandle, forwarded: Forwarded, started: float, mask: Bools | None
    ) -> None:
        self._runner.sample(handle.seq, forwarded, mask)
        self._launched.put(_Launched(handle, self._device.record(), forwarded, started))

    def _wait_loop(self) -> None:
        while (launched := self._launched.get()) is not None:
            handle, plan = launched.handle, launched.handle.step.plan
            try:
                launched.event.wait()
                tokens = np.zeros((plan.num_rows, 1), dtype=np.int32)
                sampled = self._runner.take(handle.seq, launched.forwarded)
                tokens[plan.samples, 0] = sampled
                elapsed_ms = (time.perf_counter() - launched.started) * 1e3
                handle.post(
                    StepResult(handle.seq, tokens, plan.samples.astype(np.int32), elapsed_ms)
                )
            except Exception as error:
                handle.post(error)
