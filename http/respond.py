"""Runs a job and writes its answer, whole or as a stream. Knows no wire format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from aiohttp import web

from treadle.engine.output import Completion, RequestOutput
from treadle.http.calls import Call, Job
from treadle.http.errors import Failed, describe, error_object
from treadle.http.served import ServedEngine
from treadle.http.sse import DONE, EventStream
from treadle.http.state import STATE
from treadle.http.wire.usage import Usage


class Answers(Protocol):
    """A wire format."""

    def events(self, choice: int, delta: RequestOutput) -> bytes:
        """The events of a choice's delta; may be none."""

    def end(self) -> bytes:
        """The last events, `[DONE]` included."""

    def answer(self, choices: Sequence[Completion]) -> bytes:
        """The whole answer as JSON."""


MakeAnswers = Callable[[Usage], Answers]


async def respond(
    request: web.Request, engine: ServedEngine, job: Job, make: MakeAnswers, *, is_stream: bool
) -> web.StreamResponse:
    """Raises: InvalidRequest, QueueFull, EngineClosed, Failed before anything is sent."""
    run = _stream if is_stream else _fold
    return await run(request, engine, job, make)


async def _fold(
    request: web.Request, engine: ServedEngine, job: Job, make: MakeAnswers
) -> web.StreamResponse:
    choices: list[Completion] = []
    call = Call(engine, job, lambda choice, delta: choices[choice].add(delta))
    choices += call.blank_choices()
    answers = make(call.usage)
    with request.app[STATE].abortable(job.call_id, call.abort):
        try:
            await call.start(is_watched=False)
            await call.wait()
        finally:
            call.abandon()
    for choice in choices:
        reason = choice.finish_reason
        if reason is not None and reason.status_code is not None:
            raise Failed(reason.status_code, reason.message or "the engine failed")
    return web.Response(body=answers.answer(choices), content_type="application/json")


async def _stream(
    request: web.Request, engine: ServedEngine, job: Job, make: MakeAnswers
) -> web.StreamResponse:
    call = Call(engine, job, lambda choice, delta: stream.send(choice, delta))
    answers = make(call.usage)
    stream = EventStream(request, answers.events)
    with request.app[STATE].abortable(job.call_id, call.abort):
        try:
            await call.start(is_watched=True)
            await stream.open()
            await call.wait()
            await stream.close(answers.end())
        except ConnectionError:
            raise
        except Exception as error:
            if not stream.is_open:
                raise
            await stream.close(b"data: " + error_object(*describe(error)) + b"\n\n" + DONE)
        finally:
            call.abandon()
            stream.abandon()
    return stream.response
