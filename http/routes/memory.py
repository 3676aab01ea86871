"""`/release_memory_occupation` and `/resume_memory_occupation`: lends the device's memory out.

Knows the engine's front; never what a tag stands for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from aiohttp import web

from treadle.engine.errors import TreadleError
from treadle.http.body import json_response, read_object
from treadle.http.errors import Failed
from treadle.http.state import STATE
from treadle.http.wire.memory import MemoryRequest

logger = logging.getLogger(__name__)

routes = web.RouteTableDef()


@routes.get("/release_memory_occupation", allow_head=False)
@routes.post("/release_memory_occupation")
async def release_memory_occupation(request: web.Request) -> web.Response:
    """Answers once the memory is given back; requests wait from then on."""
    engine = request.app[STATE].need_engine()
    tags = await _tags(request)
    await engine.release_memory_occupation(tags)
    return json_response(None)


@routes.get("/resume_memory_occupation", allow_head=False)
@routes.post("/resume_memory_occupation")
async def resume_memory_occupation(request: web.Request) -> web.Response:
    """Answers once the memory is there; requests go on when nothing is released any more."""
    engine = request.app[STATE].need_engine()
    tags = await _tags(request)
    try:
        await engine.resume_memory_occupation(tags)
    except TreadleError:
        raise
    except Exception as error:  # no memory, no checkpoint: the caller can do something about it
        logger.exception("Memory cannot be resumed")
        raise Failed(500, f"the memory stays released and can be resumed again: {error}") from error
    return json_response(None)


async def _tags(request: web.Request) -> Collection[str] | None:
    """None when there is no body, or one that names none."""
    if (await request.read()).strip() in (b"", b"null"):
        return None
    return MemoryRequest.parse(await read_object(request, is_openai=False)).tags
