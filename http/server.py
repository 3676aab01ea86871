"""Listens, starts the engine, serves until a signal, then drains. Knows no route.

The socket is open before the engine is there and stays open while the last answers go out, so that
a client is told 503 and when to come back, not refused.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from treadle.engine.errors import ConfigError
from treadle.http.access_log import AccessLogger, show_access_lines
from treadle.http.app import create_app
from treadle.http.connection import Connection
from treadle.http.served import ServedEngine
from treadle.http.state import ServerState

logger = logging.getLogger("treadle")

T = TypeVar("T")

ABORT_GRACE_S = 2.0  # for aborted streams to send their last event
CLOSE_GRACE_S = 0.5  # for handlers that are left after that
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 30000  # 0: any free one
    shutdown_timeout_s: float = 60.0  # for answers in flight, after the first signal
    keepalive_timeout_s: float = 120.0  # longer than the pools of common clients and proxies
    access_log: bool = True


class HttpServer:
    """A listening server around a state. `start`, then `drain` and `stop`."""

    def __init__(self, state: ServerState, settings: ServerSettings) -> None:
        self._state = state
        self._settings = settings
        self._runner = web.AppRunner(
            create_app(state), handler_cancellation=True, shutdown_timeout=CLOSE_GRACE_S
        )
        self._listener: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._listener is not None, "start() comes first"
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Raises: ConfigError when the address cannot be had."""
        host, port = self._settings.host, self._settings.port
        if not 0 <= port < 65536:
            raise ConfigError(
                f"cannot listen on --host {host} --port {port}: a port is a number from 0 to 65535"
            )
        loop = asyncio.get_running_loop()
        await self._runner.setup()
        assert self._runner.server is not None, "set up"
        connect = partial(
            Connection,
            self._runner.server,
            loop=loop,
            keepalive_timeout=self._settings.keepalive_timeout_s,
            access_log_class=AccessLogger,
        )
        try:
            self._listener = await loop.create_server(connect, host, port, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}") from None

    async def drain(self, force: Callable[[], Awaitable[object]]) -> None:
        """Takes no new work; waits for answers in flight until the timeout or `force`."""
        state = self._state
        state.is_draining = True
        await _first(state.wait_idle(), force(), asyncio.sleep(self._settings.shutdown_timeout_s))
        state.abort_all()
        with suppress(TimeoutError):
            await asyncio.wait_for(state.wait_idle(), ABORT_GRACE_S)

    async def stop(self) -> None:
        """Closes every connection."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()


async def serve(
    start_engine: Callable[[], Coroutine[Any, Any, ServedEngine]],
    state: ServerState,
    settings: ServerSettings,
    on_ready: Callable[[int], None] = lambda port: None,
) -> None:
    """Serves until SIGTERM, SIGINT or the loss of the engine's device.

    A second signal ends at once what still runs, and so does the loss.

    start_engine: runs while the server already answers 503. on_ready: told the port.
    Raises: ConfigError, ModelError or what else start_engine raises.
    """
    if settings.access_log:
        show_access_lines()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = HttpServer(state, settings)
    await server.start()
    try:
        starting = asyncio.ensure_future(start_engine())
        stopping = asyncio.ensure_future(first.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            return
        engine = state.engine = starting.result()
        on_ready(server.port)
        await _first(first.wait(), engine.lost.wait())
        if engine.lost.is_set():
            logger.error("The device is lost: the server ends its streams and leaves")
        # after a loss every request has its error already: nothing is worth waiting for
        await server.drain(lambda: _first(second.wait(), engine.lost.wait()))
    finally:
        await server.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the fastest event loop there is."""
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _first(*waits: Awaitable[object]) -> None:
    """Returns when one of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
