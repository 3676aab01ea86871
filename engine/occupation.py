"""Which memory the engine has given back, and how it stops and goes on around that.

Knows tags, the loop's hold and the executor; never a device, a tensor or why memory is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from treadle.engine.errors import EngineClosed, InvalidRequest
from treadle.engine.loop import Loop
from treadle.engine.scheduler import Scheduler
from treadle.engine.show import show
from treadle.graphs.step import MEMORY_TAGS, Executor, MemoryTag


class Occupation:
    """Releases and resumes one after the other. While anything is released no step runs."""

    def __init__(self, loop: Loop, scheduler: Scheduler, executor: Executor) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._executor = executor
        self._released: set[MemoryTag] = set()
        self._lock = asyncio.Lock()
        self._is_closed = False

    @property
    def released(self) -> tuple[MemoryTag, ...]:
        return tuple(tag for tag in MEMORY_TAGS if tag in self._released)

    async def release(self, tags: Collection[str] | None) -> None:
        """Waits for the steps in flight, not for requests, then gives the memory back.

        Raises: InvalidRequest for an unknown tag, or when the device cannot: then all is as before.
        """
        # shielded: a caller who leaves must not leave the device half-way
        await asyncio.shield(self._release(_known(tags)))

    async def resume(self, tags: Collection[str] | None) -> None:
        """Takes the memory again; once all of it is back, requests go on.

        Raises: InvalidRequest for an unknown tag; what the device raised: then the tags count as
        released, and it can be tried again.
        """
        await asyncio.shield(self._resume(_known(tags)))

    async def close(self) -> None:
        """Waits for what is under way; nothing is released or resumed any more."""
        async with self._lock:
            self._is_closed = True

    async def _release(self, tags: Collection[MemoryTag]) -> None:
        async with self._lock:
            self._check_open()
            held = [tag for tag in tags if tag not in self._released]
            if not held:
                return
            await self._loop.hold()
            try:
                self._check_open()
                await self._executor.release(held)
            except RuntimeError as error:
                self._loop.check_device(error)
                self._check_open()
                raise InvalidRequest(str(error), "tags") from error
            else:
                # only now: a refusal costs nobody anything, and nothing runs in between
                self._released.update(held)
                if "kv_cache" in held:
                    self._scheduler.lose_kv()
            finally:
                self._go_on_if_whole()

    async def _resume(self, tags: Collection[MemoryTag]) -> None:
        async with self._lock:
            self._check_open()
            gone = [tag for tag in tags if tag in self._released]
            if not gone:
                return
            try:
                await self._executor.resume(gone)
            except Exception as error:
                self._loop.check_device(error)
                self._check_open()
                raise
            self._released.difference_update(gone)
            self._go_on_if_whole()

    def _go_on_if_whole(self) -> None:
        if not self._released:
            self._loop.go_on()

    def _check_open(self) -> None:
        if self._is_closed or self._loop.error is not None:
            raise EngineClosed(self._loop.error or "the engine is shutting down")


def _known(tags: Collection[str] | None) -> Collection[MemoryTag]:
    """In the order of MEMORY_TAGS; None or none at all stands for all.

    Raises: InvalidRequest.
    """
    tags = (tags,) if isinstance(tags, str) else tags or MEMORY_TAGS
    for index, tag in enumerate(tags):
        if tag not in MEMORY_TAGS:
            legal = ", ".join(MEMORY_TAGS)
            where = f"tags[{index}]"
            raise InvalidRequest(f"{where} must be one of {legal}, got {show(tag)}", where)
    return [tag for tag in MEMORY_TAGS if tag in tags]
