"""Server-sent events written straight to the connection, with no task and no wake-up per delta.

Knows no wire format: a `Render` makes the bytes of a delta. While the client reads too slowly,
deltas of the same choice are joined and held until the connection has drained.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from aiohttp import HttpVersion11, web

from treadle.engine.output import RequestOutput

MAX_BUFFERED_BYTES = 256 * 1024  # unread by the client before deltas are held
DONE = b"data: [DONE]\n\n"

Render = Callable[[int, RequestOutput], bytes]


class EventStream:
    """The answer to one request. `send` may be called before `open`; nothing is lost."""

    def __init__(self, request: web.Request, render: Render) -> None:
        """render: the events of a choice's delta, or nothing."""
        self._request = request
        self._render = render
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._is_chunked = request.version >= HttpVersion11
        self._transport: asyncio.Transport | None = None
        self._held: dict[int, RequestOutput] = {}
        self._is_holding = True
        self._drainer: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._response.prepared

    async def open(self) -> None:
        """Sends the headers and what is held."""
        await self._response.prepare(self._request)
        transport = self._transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=MAX_BUFFERED_BYTES)
        self._release()

    def send(self, choice: int, delta: RequestOutput) -> None:
        """Writes a delta now, or holds it while the client is behind. Never blocks."""
        if self._is_holding:
            before = self._held.get(choice)
            self._held[choice] = delta if before is None else _join(before, delta)
        else:
            self._write(self._render(choice, delta))

    async def close(self, last: bytes) -> None:
        """Sends what is held, the last events and the end of the stream."""
        if self._drainer is not None:
            await self._drainer
        self._write(last)
        await self._response.write_eof()

    def abandon(self) -> None:
        """The client is gone. Does nothing after `close`."""
        if self._drainer is not None:
            self._drainer.cancel()

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    def _write(self, events: bytes) -> None:
        transport = self._transport
        if not events or transport is None or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)
        if transport.get_write_buffer_size() > MAX_BUFFERED_BYTES and not self._is_holding:
            self._is_holding = True
            self._drainer = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(ConnectionError):  # the handler is cancelled then
            await self._request.writer.drain()
            self._release()

    def _release(self) -> None:
        self._is_holding = False
        held, self._held = self._held, {}
        self._write(b"".join(self._render(choice, delta) for choice, delta in held.items()))


def _join(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
    )
