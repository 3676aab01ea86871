"""The engine as a server uses it: token ids and parameters in, deltas to sinks.

Owns requests' identity from submission to their last delta. Knows no HTTP, and no device beyond
the `Executor` protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from treadle.engine.assemble import build_scheduler
from treadle.engine.errors import EngineClosed, InvalidRequest, NotIdle, QueueFull
from treadle.engine.info import EngineLoad, Parts
from treadle.engine.intake import Intake
from treadle.engine.logs import StepLog, engine_load
from treadle.engine.loop import Loop
from treadle.engine.occupation import Occupation
from treadle.engine.options import RequestOptions
from treadle.engine.outbox import Outbox
from treadle.engine.output import FinishReason, RequestOutput, Sink
from treadle.engine.planner import Launch
from treadle.engine.request import Request
from treadle.engine.sampling_params import SamplingParams
from treadle.graphs.step import MemoryTag, StepResult

PLAIN = RequestOptions()


def _same(name: str) -> str:
    return name


def _nowhere(delta: RequestOutput) -> None:
    """Takes the deltas of a request that its caller was told is not there."""


class EngineCore:
    """Runs on the event loop that it is created on, beside whatever else runs there."""

    def __init__(self, parts: Parts) -> None:
        """Must be called on a running event loop."""
        schedule = parts.config.schedule
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self._executor = parts.executor
        self._requests: dict[str, list[Request]] = {}
        self.scheduler = build_scheduler(parts)
        self._intake = Intake(
            parts.info,
            parts.tokenizer,
            pool_tokens=self.scheduler.pages.max_tokens,
            random_seed=parts.config.model.random_seed,
            stream_interval=schedule.stream_interval,
        )
        label = "cpu graph" if parts.info.server_args.get("device") == "cpu" else "cuda graph"
        self._log = StepLog(self.scheduler, schedule.decode_log_interval, label)
        self._outbox = Outbox(self._forget, self.scheduler.abort)
        depth = 1 if schedule.disable_overlap_schedule else parts.executor.depth
        self._loop = Loop(self.scheduler, parts.executor, self._outbox, self._on_step, depth)
        self._task = asyncio.get_running_loop().create_task(self._loop.run(), name="treadle-loop")
        self._occupation = Occupation(self._loop, self.scheduler, parts.executor)
        self._is_closing = False

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not self._is_closing and self._loop.error is None and not self._task.done()

    @property
    def lost(self) -> asyncio.Event:
        """Set when the device is gone: every request has ended with an error, none is taken."""
        return self._loop.lost

    @property
    def released_memory(self) -> tuple[MemoryTag, ...]:
        """Tags of the memory that is given back at the moment; requests wait for it."""
        return self._occupation.released

    def load(self) -> EngineLoad:
        """How busy it is now."""
        return engine_load(self.scheduler, self._log.gen_throughput, self._executor.graphs())

    async def is_healthy(self, timeout: float = 5.0) -> bool:
        """Whether the loop takes turns and the device thread lives. Makes no token."""
        if self._task.done() or self._loop.error is not None or not self._executor.is_alive():
            return False
        return await self._loop.takes_turns(timeout) and self._executor.is_alive()

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, computed off the loop."""
        return await self._intake.encode(texts, add_special_tokens)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat, special tokens included (encode it without adding more).

        Raises: InvalidRequest when the template refuses the messages.
        """
        return await self._intake.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: str | None = None,
        options: RequestOptions = PLAIN,
        names: Callable[[str], str] = _same,
    ) -> str:
        """Queues the `n` choices of a request and returns its id.

        sink: gets every delta of every choice, each choice's last with a finish_reason.
        names: maps a field of SamplingParams, `prompt` or `rid` to the caller's name for it.
        Raises: InvalidRequest, QueueFull, EngineClosed.
        """
        self._check_open()
        if request_id in self._requests:
            raise InvalidRequest(f"a request with id {request_id!r} is running", names("rid"))
        requests = self._intake.requests(prompt_ids, params, sink, request_id, options, names)
        rid = requests[0].request_id
        self._requests[rid] = list(requests)
        try:
            for request in requests:
                self._queue(request)
        except QueueFull:
            del self._requests[rid]
            self._take_back(requests[: request.index])
            raise
        finally:
            self._loop.wake()
        return rid

    def abort(self, request_id: str) -> None:
        """Ends a request; each choice's last delta says `abort`. Harmless for unknown ids."""
        for request in self._requests.get(request_id, ()):
            self.scheduler.abort(request)
        self._loop.wake()

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    async def flush_cache(self, timeout: float = 0.0) -> int:
        """Forgets all cached prefixes once the engine is idle; returns the tokens freed.

        timeout: seconds to wait for that.
        Raises: NotIdle.
        """
        if not await self._loop.wait_idle(timeout):
            load = self.load()
            raise NotIdle(f"{load.num_running_reqs} requests run, {load.num_waiting_reqs} wait")
        return self.scheduler.pages.flush()

    async def release_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Gives memory back to the system: `weights`, `kv_cache`, `cuda_graph`; None: all of it.

        Steps in flight are waited for, requests are not: they stay and go on after the resume, with
        `kv_cache` from the tokens that they have. New requests wait. What is released already is
        left alone.
        Raises: InvalidRequest for an unknown tag, or when the device cannot: then all is as before;
        EngineClosed.
        """
        await self._occupation.release(tags)

    async def resume_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Takes memory again, the weights from the checkpoint; requests go on once all is back.

        Raises: InvalidRequest for an unknown tag, EngineClosed; what kept the device from it, which
        changes nothing: it can be tried again.
        """
        await self._occupation.resume(tags)

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Takes nothing new, lets running requests finish for a while, aborts the rest, closes.

        Idempotent.
        """
        self._is_closing = True
        deadline = asyncio.get_running_loop().time() + drain_s
        while self._requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        self.abort_all()
        self._loop.close()
        await self._task
        await self._occupation.close()
        await self._executor.close()
        self._intake.close()

    def _check_open(self) -> None:
        if not self.is_ready:
            raise EngineClosed(self._loop.error or "the engine is shutting down")

    def _queue(self, request: Request) -> None:
        if request.max_len == request.prompt_len:
            request.finish_reason = FinishReason("length")
            self._outbox.put((request,))  # nothing to compute
            return
        dropped = self.scheduler.submit(request)
        if dropped is not None:
            self._outbox.put((dropped,))

    def _take_back(self, choices: Sequence[Request]) -> None:
        """Ends the choices of a request that its caller is about to be told is not there."""
        for choice in choices:
            choice.sink = _nowhere
            self.scheduler.abort(choice)

    def _forget(self, request: Request) -> None:
        choices = self._requests.get(request.request_id)
        if choices and request in choices:
            choices.remove(request)
            if not choices:
                del self._requests[request.request_id]

    def _on_step(self, launch: Launch, result: StepResult) -> None:
        self._log.step(launch, int(result.num_accepted.sum()), result.replayed)
        if not self.scheduler.has_work:
            self._log.idle()
