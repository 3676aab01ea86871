"""What the routes of one server share. Knows no route and no socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from treadle.engine.errors import EngineClosed, InvalidRequest
from treadle.http.served import ServedEngine

DEFAULT_MAX_BODY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Names are SGLang's flags."""

    enable_cache_report: bool = False  # prompt_tokens_details in every usage
    incremental_streaming_output: bool = False  # /generate streams deltas, not the text so far
    stream_response_default_include_usage: bool = False
    weight_version: str = "default"
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES


class ServerState:
    """Holds the engine, once there is one, and counts the calls in flight."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        self.settings = settings or ApiSettings()
        self.engine: ServedEngine | None = None
        self.is_draining = False
        self._aborts: dict[str, Callable[[], None]] = {}
        self._num_working = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.is_ready and not self.is_draining

    def need_engine(self) -> ServedEngine:
        """Raises: EngineClosed while there is none yet."""
        if self.engine is None:
            raise EngineClosed("the server is starting")
        return self.engine

    @contextmanager
    def working(self) -> Iterator[ServedEngine]:
        """Around a call that makes tokens; shutting down waits for it.

        Raises: EngineClosed while starting or shutting down.
        """
        if self.is_draining:
            raise EngineClosed("the server is shutting down")
        engine = self.need_engine()
        self._num_working += 1
        self._idle.clear()
        try:
            yield engine
        finally:
            self._num_working -= 1
            if not self._num_working:
                self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    @contextmanager
    def abortable(self, call_id: str, abort: Callable[[], None]) -> Iterator[None]:
        """While it lasts, `abort(call_id)` ends this call, also before the engine knows it.

        Raises: InvalidRequest for an id that is in use.
        """
        if call_id in self._aborts:
            raise InvalidRequest(f"a request with id {call_id!r} is running", "rid")
        self._aborts[call_id] = abort
        try:
            yield
        finally:
            del self._aborts[call_id]

    def abort(self, request_id: str) -> None:
        """Ends a request or a whole call; harmless for unknown ids."""
        abort = self._aborts.get(request_id)
        if abort is not None:
            abort()
        else:
            self.need_engine().abort(request_id)

    def abort_all(self) -> None:
        """Ends every call, also those that the engine does not know yet."""
        for abort in list(self._aborts.values()):
            abort()
        if self.engine is not None:
            self.engine.abort_all()


STATE = web.AppKey("state", ServerState)
