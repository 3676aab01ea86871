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
from collections.abc import Collection, Set
from dataclasses import replace
from functools import partial

from treadle.graphs.capture import BackgroundCapture, keys_of
from treadle.graphs.command_codec import Release, Resume, Sampling
from treadle.graphs.device import Device
from treadle.graphs.handles import (
    CommandQueue,
    Control,
    DeviceHandle,
    Followers,
    Masked,
    Queued,
    end,
)
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
from treadle.graphs.waiter import Launched, Waiter

logger = logging.getLogger(__name__)

IDLE_S = 0.02  # without a command for so long nobody is kept waiting by a capture

YIELD_S = 0.001  # between two such captures, in which the event loop gets its turn

LOST_JOIN_S = 1.0  # for threads to end once the device is lost; they may wait for it forever


class DeviceExecutor:
    """Implements `Executor` for CUDA and the host, once it is started."""

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
        self.device = device
        self.capture = capture
        self.occupation = occupation
        self.commands = CommandQueue()
        self._released: Set[MemoryTag] = frozenset()  # once all that is queued has run
        self._is_closed = False
        self._in_flight: list[DeviceHandle] = []
        self._step_ms = 0.0  # what the last finished step took
        self._next_seq = 1
        self._forwarded: dict[int, tuple[Forwarded, float]] = {}  # constrained, not yet sampled
        self._waiter = Waiter(runner.take, self._report, self._fail)
        self._threads: list[threading.Thread] = []

    @property
    def capacity(self) -> Capacity:
        return self.runner.capacity

    @property
    def loss(self) -> Exception | None:
        """What ended everything."""
        return self.commands.loss

    @property
    def may_capture(self) -> bool:
        """Whether a capture that is queued now meets memory that is there, and no logits that
        wait for their mask, which a warm-up would overwrite. Asked while the order is held.
        """
        return not self._released and not any(handle.needs_mask for handle in self._in_flight)

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still waits for a lost device, after `close`."""
        return self._is_closed and any(thread.is_alive() for thread in self._threads)

    def lead(self, followers: Followers) -> None:
        """Takes the other ranks along. Called before `start`."""
        self.commands.followers = followers

    def start(self) -> None:
        """Starts the threads that take commands and report."""
        self._threads = [
            threading.Thread(target=self._launch_loop, name="treadle-launch", daemon=True),
            threading.Thread(target=self._waiter.run, name="treadle-wait", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        # a thread inside torch while the interpreter goes down would abort the process
        atexit.register(self._stop)

    def launch(self, step: Step) -> DeviceHandle:
        self._in_flight = [handle for handle in self._in_flight if not handle.done()]
        if not self.is_alive():
            why = "" if self.loss is None else f": {self.loss}"
            raise RuntimeError(f"the executor is closed or its device is lost{why}")
        if step.seq != self._next_seq:
            raise RuntimeError(f"step {step.seq} launched, {self._next_seq} is next")
        if len(self._in_flight) >= self.depth:
            raise RuntimeError(f"{self.depth} steps are in flight already")
        if self._in_flight and self._in_flight[-1].needs_mask:
            raise RuntimeError(f"step {self._in_flight[-1].seq} still waits for its mask")
        self._next_seq += 1
        handle = DeviceHandle(
            replace(step, choice=self.runner.graphs.choose(step.plan)), self._queue_sampling
        )
        with self.commands.order:
            self._in_flight.append(handle)
            self.commands.put(handle, handle.step)
        if self.loss is not None:  # perhaps `lose` came before the handle was there
            handle.post(self.loss)
        return handle

    def prepare(self, all_graphs: bool) -> None:
        """Captures the largest decode bucket, or everything. Blocks; the rest comes later.

        Raises: what the device was lost with.
        """
        self.commands.call(self.capture.first).result()
        self.capture.is_settled.wait()
        while all_graphs and self.capture.has_more and self.loss is None:
            self.commands.call(self.capture.one).result()
            self.capture.is_settled.wait()
        if self.loss is not None:
            raise self.loss

    async def release(self, tags: Collection[MemoryTag]) -> None:
        before = self._released
        try:
            await self._occupy(Release(tuple(tags)), before | set(tags))
        except Exception:
            self._released = before
            raise

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        left = self._released - set(tags)
        await self._occupy(Resume(tuple(tags)), self._released)
        # only now, and on the launch thread: it must not capture on what could not come back
        await asyncio.wrap_future(self.commands.call(partial(setattr, self, "_released", left)))

    def graphs(self) -> GraphReport:
        return self.runner.graphs.report()

    def is_alive(self) -> bool:
        running = all(thread.is_alive() for thread in self._threads)
        return running and not self._is_closed and self.loss is None

    def lose(self, error: Exception) -> None:
        """Ends all that is queued or in flight with an error, whatever the threads wait for.

        Any thread; nothing can follow.
        """
        if self.commands.lose(error):
            for handle in self._in_flight:
                handle.post(error)
            self.capture.is_settled.set()

    async def close(self) -> None:
        atexit.unregister(self._stop)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        """Ends the threads after what is queued. Those that wait for a lost device are left."""
        self._is_closed = True
        self.commands.close()
        patience = LOST_JOIN_S
        for thread in self._threads:
            while thread.is_alive() and patience > 0:
                thread.join(0.05)
                patience -= 0.0 if self.loss is None else 0.05

    def _queue_sampling(self, handle: DeviceHandle, mask: Bools | None) -> None:
        self.commands.put(Masked(handle, mask), Sampling(handle.seq, mask))

    async def _occupy(self, command: Release | Resume, released: Set[MemoryTag]) -> None:
        """released: what is, from the command's place in the order on."""
        if (occupation := self.occupation) is None:
            raise RuntimeError("this executor was given nothing to release")
        with self.commands.order:
            self._released = released
            done = self.commands.call(partial(occupy, self.device, occupation, command), command)
        await asyncio.wrap_future(done)

    def _launch_loop(self) -> None:
        try:
            self.device.enter_thread()
            self._consume()
        except BaseException as error:  # not a step's: those are reported to whoever waits
            logger.critical("The launch thread ends: %s", error, exc_info=error)
            self.lose(RuntimeError(f"the launch thread has ended: {error}"))
        self._waiter.put(None)

    def _consume(self) -> None:
        while (command := self._next_command()) is not None:
            if isinstance(command, Control):
                self._control(command)
                continue
            handle = command.handle if isinstance(command, Masked) else command
            try:
                if self.loss is not None:
                    raise self.loss
                if isinstance(command, Masked):
                    self._sample(command)
                else:
                    self._forward(command)
            except Exception as error:
                self._forwarded.pop(handle.seq, None)
                self._fail(handle, error)

    def _next_command(self) -> Queued | None:
        """Waits for a command; captures once there has been none for a while."""
        patience = IDLE_S
        while not (
            self.capture.is_done or self._released or self._forwarded or self.loss is not None
        ):
            try:
                return self.commands.get(timeout=patience)
            except queue.Empty:
                self.capture.when_idle()
                patience = YIELD_S
        return self.commands.get()

    def _control(self, command: Control) -> None:
        if command.done.done():
            return
        try:
            if self.loss is not None:
                raise self.loss
            command.call()
        except Exception as error:
            self._note_loss(error)
            end(command.done, error)
        else:
            end(command.done, None)

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
            self.capture.ask(keys_of(step.plan, step.choice))
        if not self._forwarded:
            self.capture.after_step(self._step_ms)

    def _sample(self, command: Masked) -> None:
        entry = self._forwarded.pop(command.handle.seq, None)
        if entry is not None:  # else the forward raised, and the handle knows
            self._finish(command.handle, *entry, command.mask)

    def _finish(
        self, handle: DeviceHandle, forwarded: Forwarded, started: float, mask: Bools | None
    ) -> None:
        event = self.runner.sample(handle.step, forwarded, mask)
        self._waiter.put(Launched(handle, event, forwarded, started))

    def _report(self, handle: DeviceHandle, result: StepResult, sampled: Int64s) -> None:
        self._step_ms = result.device_ms
        if self.commands.followers is not None:
            self.commands.followers.step_finished(handle.step, sampled)
        handle.post(result)

    def _fail(self, handle: DeviceHandle, error: Exception) -> None:
        """Tells whoever waits, after finding out whether anything can follow."""
        if self.loss is None and self.commands.followers is not None:
            self.commands.followers.step_failed(handle.seq, error)
            return
        self._note_loss(error)
        handle.post(self.loss or error)

    def _note_loss(self, error: Exception) -> None:
        if self.loss is None and self.device.is_lost():
            logger.critical("The device is lost: %s", error)
            self.lose(error)


def occupy(device: Device, occupation: Occupation, command: Release | Resume) -> None:
    """Between two steps. Raises: RuntimeError, CheckpointError."""
    device.synchronize()
    run = occupation.release if isinstance(command, Release) else occupation.resume
    run(command.tags)
