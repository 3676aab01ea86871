"""Answers of several requests, folded from their deltas and awaited together.

Knows the engine's submit and abort only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from treadle.engine.options import RequestOptions
from treadle.engine.output import Completion, RequestOutput, Sink
from treadle.engine.sampling_params import SamplingParams

SUBMIT_BATCH = 64  # prompts queued before other work gets a turn
AT_THE_END = 2**31  # a stream interval: one delta for the first token, one for the rest


class Submitter(Protocol):
    """The part of `Engine` that is needed here."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: str | None = None,
        options: RequestOptions = ...,
    ) -> str: ...

    def abort(self, request_id: str) -> None: ...


class Gathered:
    """Completions in order of submission, choice by choice."""

    def __init__(self, engine: Submitter) -> None:
        self._engine = engine
        self._completions: list[Completion] = []
        self._left: dict[str, int] = {}  # choices that still run, by request id
        self._all_done: asyncio.Future[None] | None = None  # made when somebody waits

    async def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        request_id: str | None,
        options: RequestOptions,
    ) -> None:
        """A request per prompt; several of them are numbered after the id.

        Raises: InvalidRequest, QueueFull, EngineClosed.
        """
        for index, prompt_ids in enumerate(prompts):
            is_alone = request_id is None or len(prompts) == 1
            rid = request_id if is_alone else f"{request_id}-{index}"
            self._submit(prompt_ids, params[index], rid, options)
            if index % SUBMIT_BATCH == SUBMIT_BATCH - 1:
                await asyncio.sleep(0)

    def _submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        options: RequestOptions,
    ) -> None:
        choices = [Completion("", index) for index in range(params.n)]

        def sink(delta: RequestOutput) -> None:
            choice = choices[delta.index]
            choice.request_id = delta.request_id
            choice.add(delta)
            if delta.finish_reason is not None:
                self._finish(delta.request_id)

        quiet = replace(params, stream_interval=AT_THE_END)
        rid = self._engine.submit(prompt_ids, quiet, sink, request_id=request_id, options=options)
        self._completions += choices
        self._left[rid] = params.n

    async def wait(self) -> list[Completion]:
        """All answers, once every choice has ended."""
        if self._left:
            self._all_done = asyncio.get_running_loop().create_future()
            await self._all_done
        return self._completions

    def abandon(self) -> None:
        """Aborts what still runs; nothing when all is done."""
        for rid in self._left:
            self._engine.abort(rid)

    def _finish(self, rid: str) -> None:
        self._left[rid] -= 1
        if not self._left[rid]:
            del self._left[rid]
        if not self._left and self._all_done is not None and not self._all_done.done():
            self._all_done.set_result(None)
