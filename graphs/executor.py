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
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from treadle.graphs.capture import BackgroundCapture, keys_of
from treadle.graphs.device import Device, Event
from treadle.graphs.occupation import Occupation
from treadle.graphs.runner import Forwarded, Runner
from treadle.graphs.step import (
    Bools,
    Capacity,
    GraphReport,
    Int64s,
    MemoryTag,
    Step,
    StepResult,
)

logger = logging.getLogger(__name__)

IDLE_S = 0.02  # without a command for so long nobody is kept waiting by a capture

YIELD_S = 0.001  # between two such captures, in which the event loop gets its turn


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
class _Control:
    """Command: something between two steps."""

    call: Callable[[], None]
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose last device work is queued."""

    handle: DeviceHandle
    event: Event
    forwarded: Forwarded
    started: float


_Command = DeviceHandle | _Sampling | _Control | None


class DeviceExecutor:
    """Implements `Executor` for CUDA and the host."""

    def __init__(
        self,
        runner: Runner,
        device: Device,
        depth: int,
        capture: BackgroundCapture,
        occupation: Occupation | None = None,
    ) -> None:
        """occupation: None for memory that is never given back."""
        self.depth = depth
        self.runner = runner
        self._device = device
        self._capture = capture
        self._occupation = occupation
        self._is_lost = False
        self._step_ms = 0.0  # what the last finished step took
        self._in_flight: list[DeviceHandle] = []
        self._next_seq = 1
        self._forwarded: dict[int, tuple[Forwarded, float]] = {}  # constrained, not yet sampled
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
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
        return self.runner.capacity

    def launch(self, step: Step) -> DeviceHandle:
        self._in_flight = [handle for handle in self._in_flight if not handle.done()]
        if not self.is_alive():
            raise RuntimeError("the executor is closed or its device is lost")
        if step.seq != self._next_seq:
            raise RuntimeError(f"step {step.seq} launched, {self._next_seq} is next")
        if len(self._in_flight) >= self.depth:
            raise RuntimeError(f"{self.depth} steps are in flight already")
        if self._in_flight and self._in_flight[-1].needs_mask:
            raise RuntimeError(f"step {self._in_flight[-1].seq} still waits for its mask")
        self._next_seq += 1
        handle = DeviceHandle(self, replace(step, choice=self.runner.graphs.choose(step.plan)))
        self._in_flight.append(handle)
        self._commands.put(handle)
        return handle

    def queue_sampling(self, handle: DeviceHandle, mask: Bools | None) -> None:
        """Called by the handle, once."""
        self._commands.put(_Sampling(handle, mask))

    def prepare(self, all_graphs: bool) -> None:
        """Captures the largest decode bucket, or everything. Blocks; the rest comes later."""

        def run() -> None:
            self._capture.first()
            if all_graphs:
                self._capture.all()

        self._queue_control(run).result()

    async def release(self, tags: Collection[MemoryTag]) -> None:
        if self._occupation is None:
            raise RuntimeError("this executor was given nothing to release")
        call = partial(self._occupation.release, tags)
        await asyncio.wrap_future(self._queue_control(call))

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        if self._occupation is None:
            raise RuntimeError("this executor was given nothing to release")
        call = partial(self._occupation.resume, tags)
        await asyncio.wrap_future(self._queue_control(call))

    def graphs(self) -> GraphReport:
        return self.runner.graphs.report()

    def is_alive(self) -> bool:
        return not self._is_lost and all(thread.is_alive() for thread in self._threads)

    async def close(self) -> None:
        atexit.unregister(self._stop)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """Ends the threads after what is queued."""
        self._commands.put(None)
        for thread in self._threads:
            thread.join()

    def _queue_control(self, call: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._commands.put(_Control(call, done))
        return done

    def _launch_loop(self) -> None:
        try:
            self._device.enter_thread()
            self._consume()
        except BaseException as error:  # not a step's: those are reported to whoever waits
            logger.critical("The launch thread ends: %s", error, exc_info=error)
            self._is_lost = True
            for handle in list(self._in_flight):
                handle.post(RuntimeError(f"the launch thread has ended: {error}"))
        self._launched.put(None)

    def _consume(self) -> None:
        while (command := self._next_command()) is not None:
            if isinstance(command, _Control):
                self._control(command)
                continue
            handle = command.handle if isinstance(command, _Sampling) else command
            try:
                if self._is_lost:
                    raise RuntimeError("the device is lost")
                if isinstance(command, _Sampling):
                    self._sample(command)
                else:
                    self._forward(command)
            except Exception as error:
                self._forwarded.pop(handle.seq, None)
                self._fail(handle, error)

    def _next_command(self) -> _Command:
        """Waits for a command; captures once there has been none for a while."""
        patience = IDLE_S
        # a warm-up would overwrite logits that wait for their mask
        while not (self._capture.is_done or self._is_lost or self._forwarded):
            try:
                return self._commands.get(timeout=patience)
            except queue.Empty:
                self._capture.when_idle()
                patience = YIELD_S
        return self._commands.get()

    def _control(self, command: _Control) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        try:
            self._device.synchronize()
            command.call()
        except Exception as error:
            self._note_loss(error)
            command.done.set_exception(error)
        else:
            command.done.set_result(None)

    def _forward(self, handle: DeviceHandle) -> None:
        started = time.perf_counter()
        step = handle.step
        forwarded = self.runner.forward(step)
        if step.plan.is_constrained:
            self._forwarded[handle.seq] = (forwarded, started)
        else:
            self._finish(handle, forwarded, started, None)
        assert step.choice is not None
        if not step.choice.replays:
            self._capture.ask(keys_of(step.plan, step.choice))
        if not self._forwarded:
            self._capture.after_step(self._step_ms)

    def _sample(self, command: _Sampling) -> None:
        entry = self._forwarded.pop(command.handle.seq, None)
        if entry is not None:  # else the forward raised, and the handle knows
            self._finish(command.handle, *entry, command.mask)

    def _finish(
        self, handle: DeviceHandle, forwarded: Forwarded, started: float, mask: Bools | None
    ) -> None:
        event = self.runner.sample(handle.step, forwarded, mask)
        self._launched.put(_Launched(handle, event, forwarded, started))

    def _wait_loop(self) -> None:
        while (launched := self._launched.get()) is not None:
            handle = launched.handle
            try:
                launched.event.wait()
                sampled = self.runner.take(handle.seq, launched.forwarded)
                result = _result(launched, sampled)
                self._step_ms = result.device_ms
                handle.post(result)
            except Exception as error:
                self._fail(handle, error)

    def _fail(self, handle: DeviceHandle, error: Exception) -> None:
        """Tells whoever waits, after finding out whether anything can follow."""
        self._note_loss(error)
        handle.post(error)

    def _note_loss(self, error: Exception) -> None:
        if not self._is_lost and self._device.is_lost():
            logger.critical("The device is lost: %s", error)
            self._is_lost = True


def _result(launched: _Launched, sampled: Int64s) -> StepResult:
    """sampled: [N] tokens of the rows that sample."""
    step = launched.handle.step
    tokens = np.zeros((step.plan.num_rows, 1), dtype=np.int32)
    tokens[step.plan.samples, 0] = sampled
    elapsed_ms = (time.perf_counter() - launched.started) * 1e3
    accepted = step.plan.samples.astype(np.int32)
    replayed = step.choice is not None and step.choice.replays
    return StepResult(step.seq, tokens, accepted, elapsed_ms, replayed)
