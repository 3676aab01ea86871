"""One HTTP call's requests to the engine: a request per prompt, `n` choices each.

Knows no wire format. Choices are numbered prompt by prompt.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from treadle.engine.errors import InvalidRequest
from treadle.engine.options import RequestOptions
from treadle.engine.output import Completion, RequestOutput
from treadle.engine.sampling_params import SamplingParams
from treadle.http.served import ServedEngine
from treadle.http.wire.base import Prompts
from treadle.http.wire.usage import Usage

MAX_CHOICES = 2**16  # of one call
SUBMIT_BATCH = 64  # prompts queued before other work gets a turn
FOLDED_INTERVAL = 256  # tokens per delta where nobody watches
ROUTING_KEY_HEADER = "x-smg-routing-key"  # as a gateway sends it; a body's own key goes first

OnDelta = Callable[[int, RequestOutput], None]
Encode = Callable[[], Awaitable[Sequence[Sequence[int]]]]  # the token ids of each prompt


@dataclass(frozen=True, slots=True)
class Job:
    """What a call asks of the engine, checked as far as the wire can."""

    encode: Encode
    params: Sequence[SamplingParams]  # one per prompt
    options: Sequence[RequestOptions]  # one per prompt
    request_ids: Sequence[str]  # one per prompt
    call_id: str
    names: Callable[[str], str]  # a field of SamplingParams, `prompt` or `rid` as the client says


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def name_requests(
    prompts: Prompts, rid: str | list[str] | None, prefix: str
) -> tuple[str, list[str]]:
    """The id of the call and of each of its requests.

    Raises: InvalidRequest when a list of ids does not fit the prompts.
    """
    if isinstance(rid, list):
        if not prompts.is_batch or len(rid) != len(prompts):
            raise InvalidRequest(
                f"rid must be one id or one for each of the {len(prompts)} prompts, got {len(rid)}",
                "rid",
            )
        return new_id(prefix), rid
    call_id = rid or new_id(prefix)
    if not prompts.is_batch:
        return call_id, [call_id]
    return call_id, [f"{call_id}_{i}" for i in range(len(prompts))]


def encoder(engine: ServedEngine, prompts: Prompts) -> Encode:
    """Gives the token ids of prompts; texts get the special tokens that the tokenizer adds."""

    async def encode() -> Sequence[Sequence[int]]:
        return prompts.ids if prompts.texts is None else await engine.encode(prompts.texts)

    return encode


class Call:
    """Runs a job. `wait` returns when every choice has ended; leaving early needs `abandon`."""

    def __init__(self, engine: ServedEngine, job: Job, on_delta: OnDelta) -> None:
        """on_delta: takes the choice's number in the call and its delta; what it raises ends it.

        Raises: InvalidRequest, NotBuilt.
        """
        for params in {id(each): each for each in job.params}.values():
            params.validate(engine.info.vocab_size, job.names)
        self._left = sum(params.n for params in job.params)
        if self._left > MAX_CHOICES:
            raise InvalidRequest(
                f"one call may ask for at most {MAX_CHOICES} choices, got {self._left}",
                job.names("prompt"),
            )
        self.usage = Usage()
        self._engine = engine
        self._job = job
        self._is_abort_wanted = False
        self._on_delta = on_delta
        self._unfinished: dict[str, int] = {}  # choices left, by request id
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def blank_choices(self) -> list[Completion]:
        """One per choice, for a caller that folds."""
        return [
            Completion(request_id, index)
            for request_id, params in zip(self._job.request_ids, self._job.params, strict=True)
            for index in range(params.n)
        ]

    async def start(self, *, is_watched: bool) -> None:
        """Encodes and queues every prompt. is_watched: somebody sees each delta as it comes.

        Raises: InvalidRequest, QueueFull, EngineClosed; what was queued before must be abandoned.
        """
        first = 0
        for index, ids in enumerate(await self._job.encode()):
            params, options = self._job.params[index], self._job.options[index]
            if not is_watched and params.stream_interval is None:
                params = replace(params, stream_interval=FOLDED_INTERVAL)
            self._submit_one(ids, params, options, self._job.request_ids[index], first)
            first += params.n
            if index % SUBMIT_BATCH == SUBMIT_BATCH - 1:
                await asyncio.sleep(0)

    def _submit_one(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str,
        first: int,
    ) -> None:
        on_delta, usage, done = self._on_delta, self.usage, self._done
        num_cached = 0

        def sink(delta: RequestOutput) -> None:
            nonlocal num_cached
            if done.done():
                return
            usage.completion_tokens += len(delta.token_ids)
            if delta.index == 0:  # the other choices find the prompt that this one left behind
                usage.cached_tokens += delta.cached_tokens - num_cached
                num_cached = delta.cached_tokens
            try:
                on_delta(first + delta.index, delta)
            except Exception as error:
                done.set_exception(error)
                raise
            if delta.finish_reason is not None:
                self._finish(request_id)

        names = self._job.names
        if request_id in self._unfinished:
            raise InvalidRequest(f"rid {request_id!r} stands twice in one call", names("rid"))
        self._engine.submit(ids, params, sink, request_id=request_id, options=options, names=names)
        self._unfinished[request_id] = params.n
        usage.prompt_tokens += len(ids)
        if self._is_abort_wanted:
            self._engine.abort(request_id)

    def _finish(self, request_id: str) -> None:
        self._unfinished[request_id] -= 1
        if not self._unfinished[request_id]:
            del self._unfinished[request_id]
        self._left -= 1
        if not self._left:
            self._done.set_result(None)

    async def wait(self) -> None:
        """Raises: what on_delta raised."""
        await self._done

    def abort(self) -> None:
        """Ends what runs or is yet to be queued; each choice's last delta says so."""
        self._is_abort_wanted = True
        for request_id in list(self._unfinished):
            self._engine.abort(request_id)

    def abandon(self) -> None:
        """Nobody listens any more: ends what still runs, in silence. Does nothing at the end."""
        if not self._done.cancel() and not self._done.cancelled():
            self._done.exception()  # seen, so that the event loop does not report it
        self.abort()
