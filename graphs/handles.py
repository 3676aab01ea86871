"""Commands in one order, and what is given out for them: a step's handle, a call's future.

Knows threads and the event loop; never a device, a plan's meaning or how a rank is reached.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.graphs.command_codec import Command
from treadle.graphs.step import Bools, Int64s, Step, StepResult

logger = logging.getLogger(__name__)


class Followers(Protocol):
    """The other ranks, which run the same commands in the same order."""

    def send(self, command: Command) -> Future[None] | None:
        """Sends a command on, at once. Called in the commands' order, by one thread at a time.

        Returns what all their answers end in, for a command that is answered.
        """

    def step_finished(self, step: Step, tokens: Int64s) -> None:
        """The step's tokens [N] have come. Called on the waiter thread."""

    def step_failed(self, seq: int, error: Exception) -> None:
        """The step raised here. Ends in a call of `lose`: no rank goes on without the others."""


class DeviceHandle:
    """A launched step. Created and awaited on the event loop's thread."""

    def __init__(self, step: Step, queue: Callable[[DeviceHandle, Bools | None], None]) -> None:
        """queue: takes the mask of a constrained plan."""
        self.seq = step.seq
        self.step = step
        self.needs_mask = step.plan.is_constrained
        self._queue = queue
        self._future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return self._future.done()

    def sample(self, mask: Bools | None) -> None:
        if not self.needs_mask:
            raise RuntimeError(f"step {self.seq} waits for no mask")
        self._queue(self, mask)
        self.needs_mask = False

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
class Masked:
    """Command: `Sampling`, with the handle of its step."""

    handle: DeviceHandle
    mask: Bools | None


@dataclass(frozen=True, slots=True)
class Control:
    """Command: something between two steps, perhaps over all ranks."""

    call: Callable[[], None]
    done: Future[None]


Queued = DeviceHandle | Masked | Control


class CommandQueue:
    """Commands in the one order, here and on the other ranks. Any thread puts, one gets."""

    def __init__(self) -> None:
        self.followers: Followers | None = None
        self.loss: Exception | None = None
        self.order = threading.RLock()  # held while a command is sent on and queued
        self._is_closed = False
        self._queued: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._controls: set[Future[None]] = set()  # queued and not done

    def put(self, command: Queued, shared: Command | None = None) -> Future[None] | None:
        """shared: what the other ranks are sent. Returns what their answers end in, if any come."""
        with self.order:
            answers = None
            if shared is not None and self.followers is not None:
                answers = self.followers.send(shared)
            self._queued.put(command)
            return answers

    def call(self, call: Callable[[], None], shared: Command | None = None) -> Future[None]:
        """Queues a call between two steps.

        shared: the command that makes the other ranks do the same. Returns what all of it ends in.
        """
        control = Control(call, Future())
        with self.order:
            if self.loss is not None or self._is_closed:  # nobody takes it, or answers it
                end(control.done, self.loss or RuntimeError("the executor is closed"))
                return control.done
            self._controls.add(control.done)
            control.done.add_done_callback(self._controls.discard)
            answers = self.put(control, shared)
        return control.done if answers is None else both(control.done, answers)

    def get(self, timeout: float | None = None) -> Queued | None:
        """None once closed and empty. Raises: queue.Empty after `timeout` seconds."""
        return self._queued.get(timeout=timeout)

    def lose(self, error: Exception) -> bool:
        """Ends calls that are queued or running. Returns whether this is the first loss."""
        with self.order:
            if self.loss is not None:
                return False
            self.loss = error
            controls = list(self._controls)
        for done in controls:
            end(done, error)
        return True

    def close(self) -> None:
        """Lets `get` end after what is queued."""
        with self.order:
            self._is_closed = True
            self._queued.put(None)


def end(done: Future[None], error: BaseException | None) -> None:
    """Gives a future its outcome, unless it has one."""
    with suppress(InvalidStateError):
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def both(one: Future[None], other: Future[None]) -> Future[None]:
    """Done when both are, with the first error."""
    done: Future[None] = Future()

    def look(_: Future[None]) -> None:
        if one.done() and other.done():
            end(done, one.exception() or other.exception())

    one.add_done_callback(look)
    other.add_done_callback(look)
    return done
