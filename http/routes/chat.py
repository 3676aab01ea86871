"""`/v1/chat/completions`. Knows wire formats and the engine's front, no model."""

from __future__ import annotations

from aiohttp import web

from treadle.http.body import read_object
from treadle.http.calls import ROUTING_KEY_HEADER, Job, new_id
from treadle.http.respond import respond
from treadle.http.routes.models import check_model
from treadle.http.served import ServedEngine
from treadle.http.state import STATE, ServerState
from treadle.http.wire.chat import ChatRequest, read_messages
from treadle.http.wire.common import CommonFields
from treadle.http.wire.openai_answers import ChatAnswers, Head

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    with state.working() as engine:
        body = ChatRequest.parse(await read_object(request, is_openai=True))
        check_model(engine, body.model)
        body.check()
        call_id = body.rid or new_id("chatcmpl-")
        messages = await read_messages(body.messages)

        async def encode() -> list[list[int]]:
            text = await engine.render_chat(
                messages,
                add_generation_prompt=not body.continue_final_message,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
            )
            return await engine.encode([text], add_special_tokens=False)

        params = [body.to_params(body.length)]
        options = body.request_options(1, request.headers.get(ROUTING_KEY_HEADER))
        job = Job(encode, params, options, [call_id], call_id, body.client_name)
        head = make_head(state, engine, call_id, body)
        return await respond(
            request, engine, job, lambda usage: ChatAnswers(head, usage), is_stream=body.stream
        )


def make_head(state: ServerState, engine: ServedEngine, call_id: str, body: CommonFields) -> Head:
    settings, options = state.settings, body.stream_options
    default = settings.stream_response_default_include_usage
    return Head(
        id=call_id,
        model=engine.info.served_model_name,
        weight_version=settings.weight_version,
        shows_cached=settings.enable_cache_report,
        include_usage=options.include_usage if options is not None else default,
        continuous_usage=options is not None and options.continuous_usage_stats,
    )
