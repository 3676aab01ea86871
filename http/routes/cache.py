"""`/flush_cache`: forgets every cached prefix. Makes no token."""

from __future__ import annotations

from aiohttp import web

from treadle.engine.errors import InvalidRequest
from treadle.engine.show import show
from treadle.http.state import STATE

MAX_WAIT_S = 3600

routes = web.RouteTableDef()


@routes.get("/flush_cache", allow_head=False)
@routes.post("/flush_cache")
async def flush_cache(request: web.Request) -> web.Response:
    """Waits up to `timeout` seconds for the engine to be idle, else 400."""
    engine = request.app[STATE].need_engine()
    num_tokens = await engine.flush_cache(_seconds(request.query.get("timeout") or "0"))
    return web.Response(text=f"Cache flushed. {num_tokens} tokens were cached.\n")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InvalidRequest(
            f"timeout must be a number of seconds from 0 to {MAX_WAIT_S}, got {show(text)}",
            "timeout",
        )
    return seconds
