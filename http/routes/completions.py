"""`/v1/completions`. Knows wire formats and the engine's front, no model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from aiohttp import web

from treadle.engine.errors import InvalidRequest
from treadle.http.body import read_object
from treadle.http.calls import ROUTING_KEY_HEADER, Job, encoder, name_requests
from treadle.http.respond import respond
from treadle.http.routes.chat import make_head
from treadle.http.routes.models import check_model
from treadle.http.served import ServedEngine
from treadle.http.state import STATE
from treadle.http.wire.base import Prompts
from treadle.http.wire.completions import CompletionRequest
from treadle.http.wire.openai_answers import CompletionAnswers

routes = web.RouteTableDef()


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    with state.working() as engine:
        body = CompletionRequest.parse(await read_object(request, is_openai=True))
        check_model(engine, body.model)
        body.check()
        prompts = body.prompt
        call_id, request_ids = name_requests(prompts, body.rid, "cmpl-")
        params = body.to_params(body.max_tokens)
        job = Job(
            encoder(engine, prompts),
            [params] * len(prompts),
            body.request_options(len(prompts), request.headers.get(ROUTING_KEY_HEADER)),
            request_ids,
            call_id,
            body.client_name,
        )
        head = make_head(state, engine, call_id, body)
        echo = _echo(engine, prompts, params.n, params.skip_special_tokens) if body.echo else None
        return await respond(
            request,
            engine,
            job,
            lambda usage: CompletionAnswers(head, usage, echo),
            is_stream=body.stream,
        )


def _echo(
    engine: ServedEngine, prompts: Prompts, n: int, skip_special_tokens: bool
) -> Callable[[int], str]:
    """The prompt text of a choice.

    Raises: InvalidRequest for token ids without a tokenizer.
    """
    texts, tokenizer = prompts.texts, engine.tokenizer
    if texts is not None:
        return lambda choice: texts[choice // n]
    if tokenizer is None:
        raise InvalidRequest("echo needs a tokenizer, and this server has none", "echo")

    @cache
    def decode(index: int) -> str:
        return tokenizer.decode(prompts.ids[index], skip_special_tokens)

    return lambda choice: decode(choice // n)
