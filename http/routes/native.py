"""SGLang's own API: `/generate` and `/abort_request`. Knows wire formats and the engine's front."""

from __future__ import annotations

from aiohttp import web

from treadle.http.body import read_object
from treadle.http.calls import ROUTING_KEY_HEADER, Job, encoder, name_requests
from treadle.http.respond import respond
from treadle.http.state import STATE
from treadle.http.wire.native import AbortRequest, GenerateRequest
from treadle.http.wire.native_answers import NativeAnswers
from treadle.http.wire.usage import Usage

routes = web.RouteTableDef()


@routes.post("/generate")
@routes.put("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    with state.working() as engine:
        body = GenerateRequest.parse(await read_object(request, is_openai=False))
        body.check()
        prompts = body.prompts
        params = body.params(len(prompts))
        call_id, request_ids = name_requests(prompts, body.rid, "")
        routing_key = body.routing_key or request.headers.get(ROUTING_KEY_HEADER)
        job = Job(
            encoder(engine, prompts),
            params,
            body.request_options(len(prompts), routing_key),
            request_ids,
            call_id,
            body.client_name,
        )

        def make(usage: Usage) -> NativeAnswers:
            return NativeAnswers(
                is_list=prompts.is_batch or params[0].n > 1,
                is_incremental=state.settings.incremental_streaming_output,
                weight_version=state.settings.weight_version,
            )

        return await respond(request, engine, job, make, is_stream=body.stream)


@routes.post("/abort_request")
async def abort_request(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.need_engine()
    body = AbortRequest.parse(await read_object(request, is_openai=False))
    body.check()
    if body.abort_all:
        state.abort_all()
    else:
        state.abort(body.rid or "")
    return web.Response()
