"""Liveness, readiness and a word of greeting. Makes no token and waits in no queue."""

from __future__ import annotations

from aiohttp import web

from treadle.engine.errors import EngineClosed
from treadle.http.state import STATE

HEALTH_TIMEOUT_S = 5.0

routes = web.RouteTableDef()


@routes.get("/")
async def root(_: web.Request) -> web.Response:
    return web.Response(text="Treadle is running\n")


@routes.get("/health")
async def health(request: web.Request) -> web.Response:
    """200 when the loop and the device thread answer; 503 while starting and shutting down.

    Released memory is no reason for a restart: the text says what is away.
    """
    state = request.app[STATE]
    engine = state.need_engine()
    if state.is_draining:
        raise EngineClosed("the server is shutting down")
    if not await engine.is_healthy(HEALTH_TIMEOUT_S):
        raise EngineClosed("the engine does not answer")
    if engine.released_memory:
        return web.Response(text=f"released: {', '.join(engine.released_memory)}\n")
    return web.Response()


@routes.get("/ready")
async def ready(request: web.Request) -> web.Response:
    """Whether new requests are taken."""
    state = request.app[STATE]
    if not state.is_ready:
        state.need_engine()
        raise EngineClosed("the server is shutting down")
    return web.Response()
