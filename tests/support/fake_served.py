"""A served engine without a model, for tests of the server: words chosen by the prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.engine.chat_template import ChatTemplate
from treadle.engine.errors import EngineClosed, InvalidRequest, NotIdle, QueueFull
from treadle.engine.info import EngineInfo, EngineLoad
from treadle.engine.options import RequestOptions
from treadle.engine.output import FinishReason, RequestOutput, Sink
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.tokenizer import Tokenizer

MODEL = "tiny-model"
BOS, EOS = 256, 257
VOCAB = 258
MAX_LEN = 4096
WORDS = ["Hello", " wörld", " 🦙", "\n", ' "quoted"', " a\\b", " 日本語", " \u2028", " end", "é"]
TEMPLATE = ChatTemplate(
    """<s>
{%- for m in messages %}
    {%- if m.content == 'refuse me' %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- m.role + ':' + m.content + ('' if loop.last else '|') }}
{%- endfor %}
{%- if mood is defined %}{{- '|' + mood }}{% endif %}
{%- if add_generation_prompt %}{{- '|assistant:' }}{% endif %}""",
    {},
    "the fake",
)


class ByteTokenizer:
    """A token per UTF-8 byte. Encoding adds BOS, as does the chat template by itself."""

    vocab_size = VOCAB
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({BOS, EOS})
    has_chat_template = True

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        start = [BOS] if add_special_tokens else []
        return [start + self._ids(text) for text in texts]

    @staticmethod
    def _ids(text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(text.split("<s>")):
            ids += [BOS] * (i > 0) + list(part.encode())
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        return TEMPLATE.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


PLAIN = RequestOptions()


@dataclass
class Submitted:
    ids: list[int]
    params: SamplingParams
    request_id: str
    options: RequestOptions


@dataclass
class FakeEngine:
    """Answers every prompt with words chosen by its ids and the choice, one a turn of the loop."""

    info: EngineInfo = field(default_factory=lambda: _info())
    tokenizer: Tokenizer | None = field(default_factory=ByteTokenizer)
    submitted: list[Submitted] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    failure: FinishReason | None = None  # ends every choice after its second token
    num_cached: int = 0  # of every prompt's tokens; further choices find all of it
    num_retractions: int = 0  # of every request, from its second token on
    max_queued: int | None = None
    flush_timeouts: list[float] = field(default_factory=list)
    memory_calls: list[tuple[str, Collection[str] | None]] = field(default_factory=list)
    memory_error: Exception | None = None  # raised by every release and resume
    released_memory: Sequence[str] = ()
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    num_encoding: int = 0
    is_ready: bool = True
    healthy: bool = True

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()  # closed: no token comes
        self.gate.set()
        self.encode_gate = asyncio.Event()
        self.encode_gate.set()
        self._left: dict[str, int] = {}  # choices
        self._tasks: set[asyncio.Task[None]] = set()
        self._abort: set[str] = set()

    @property
    def num_running(self) -> int:
        return len(self._left)

    async def is_healthy(self, timeout: float = 5.0) -> bool:
        return self.healthy

    def load(self) -> EngineLoad:
        return EngineLoad(self.num_running, 0, 0, 7, 7, 1000, 12.5)

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        self.num_encoding += 1
        await self.encode_gate.wait()
        self.num_encoding -= 1
        assert self.tokenizer is not None
        return self.tokenizer.encode(texts, add_special_tokens)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
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
        names: Callable[[str], str] = lambda name: name,
    ) -> str:
        if not self.is_ready:
            raise EngineClosed("the engine is shutting down")
        params.validate(VOCAB, names)
        where = names("prompt")
        if not prompt_ids:
            raise InvalidRequest(f"{where} must hold at least one token", where)
        if any(not 0 <= i < VOCAB for i in prompt_ids):
            raise InvalidRequest(f"{where} must hold token ids from 0 to {VOCAB - 1}", where)
        if len(prompt_ids) >= MAX_LEN:
            raise InvalidRequest(f"{where} has {len(prompt_ids)} tokens of {MAX_LEN}", where)
        if self.max_queued is not None and len(self._left) >= self.max_queued:
            raise QueueFull(f"the request queue is full: {self.max_queued} requests wait already")
        assert request_id is not None
        if request_id in self._left:
            raise InvalidRequest(f"a request with id {request_id!r} is running", names("rid"))
        self.submitted.append(Submitted(list(prompt_ids), params, request_id, options))
        loop = asyncio.get_running_loop()
        self._left[request_id] = params.n
        for index in range(params.n):
            run = self._run(list(prompt_ids), params, sink, request_id, index)
            task = loop.create_task(run)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return request_id

    async def _run(
        self, ids: list[int], params: SamplingParams, sink: Sink, request_id: str, index: int
    ) -> None:
        words = reply(ids, index)
        reason: FinishReason | None = None
        count = 0
        while reason is None:
            await self._turn(request_id)
            reason = self._ending(request_id, params, count, len(words))
            text = words[count % len(words)] if reason is None or reason.type == "length" else ""
            new = [count % VOCAB]
            if params.max_new_tokens == 0 or request_id in self._abort:
                text, new = "", []
            count += len(new)
            cached = min(self.num_cached, len(ids) - 1) if index == 0 else len(ids) - 1
            retractions = self.num_retractions if count > 1 else 0
            delta = RequestOutput(
                request_id, index, text, new, len(ids), count, cached, reason, retractions
            )
            try:
                sink(delta)
            except Exception:
                self._abort.add(request_id)
        self._left[request_id] -= 1
        if not self._left[request_id]:
            del self._left[request_id]
            self._abort.discard(request_id)

    def _ending(
        self, request_id: str, params: SamplingParams, count: int, num_words: int
    ) -> FinishReason | None:
        """Why the token after `count` tokens is the last, or None."""
        if request_id in self._abort:
            return FinishReason("abort")
        if self.failure is not None and count == 1:
            return self.failure
        if count + 1 == num_words and not params.ignore_eos:
            return FinishReason("stop", EOS)
        limit = MAX_LEN if params.max_new_tokens is None else params.max_new_tokens
        return FinishReason("length") if count + 1 >= limit else None

    async def _turn(self, request_id: str) -> None:
        await asyncio.sleep(0)
        while not self.gate.is_set() and request_id not in self._abort:
            await asyncio.sleep(0.001)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._left:
            self._abort.add(request_id)

    def abort_all(self) -> None:
        for request_id in list(self._left):
            self.abort(request_id)

    async def flush_cache(self, timeout: float = 0.0) -> int:
        self.flush_timeouts.append(timeout)
        try:
            async with asyncio.timeout(timeout):
                while self._left:
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise NotIdle(f"{self.num_running} requests run") from None
        return 7

    async def release_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        self._note_memory_call("release", tags)

    async def resume_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        self._note_memory_call("resume", tags)

    def _note_memory_call(self, name: str, tags: Collection[str] | None) -> None:
        self.memory_calls.append((name, tags))
        if self.memory_error is not None:
            raise self.memory_error


def reply(prompt_ids: Sequence[int], index: int) -> list[str]:
    """The words of a choice; the last one is the end token, which has no text."""
    chooser = random.Random(repr((list(prompt_ids), index)))
    return [chooser.choice(WORDS) for _ in range(chooser.randrange(4, 12))]


def reply_text(prompt_ids: Sequence[int], index: int = 0, limit: int | None = None) -> str:
    words = reply(prompt_ids, index)[:-1]
    return "".join(words if limit is None else words[:limit])


def _info() -> EngineInfo:
    return EngineInfo(
        served_model_name=MODEL,
        model_path="/models/tiny",
        tokenizer_path="/models/tiny",
        architectures=("LlamaForCausalLM",),
        model_type="llama",
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        created=1_700_000_000,
        version="0.0.1",
        server_args={"page_size": 1, "load_format": "auto", "max_running_requests": 8},
    )
