"""From what a caller hands in to Requests: encoding, checks, clamping, seeds.

Knows the model's limits; never a queue, a page or a device.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treadle.engine.errors import InvalidRequest
from treadle.engine.info import EngineInfo
from treadle.engine.options import RequestOptions
from treadle.engine.output import Sink
from treadle.engine.request import Request
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.show import show
from treadle.engine.text_stream import TextStream
from treadle.engine.tokenizer import Tokenizer

ENCODE_THREADS = 2


def as_prompts(prompt: object) -> tuple[bool, list[str | Sequence[int]]]:
    """Whether it is a batch, and its prompts: text, or a list of token ids.

    Raises: InvalidRequest for anything else.
    """
    if isinstance(prompt, str):
        return False, [prompt]
    if not isinstance(prompt, Sequence):
        raise InvalidRequest(
            f"prompt must be text, token ids or a list of such, got {show(prompt)}", "prompt"
        )
    if all(isinstance(token, (int, float)) for token in prompt):
        return False, [list(prompt)]  # what is no id is found when they are checked
    for each in prompt:
        if not isinstance(each, (str, Sequence)):
            raise InvalidRequest(
                f"prompt must be text, token ids or a list of such; it holds {show(each)}", "prompt"
            )
    return True, list(prompt)


class Intake:
    """Stateless but for the generator of seeds and the threads that encode."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        *,
        pool_tokens: int,
        random_seed: int | None,
        stream_interval: int,
    ) -> None:
        """pool_tokens: what the KV pool holds; no sequence can be longer."""
        self._info = info
        self._tokenizer = tokenizer
        self._pool_tokens = pool_tokens
        self._max_len = min(info.max_model_len, pool_tokens)
        self._stream_interval = stream_interval
        self._random = random.Random(random_seed)
        self._threads = ThreadPoolExecutor(ENCODE_THREADS, "treadle-encode")

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        tokenizer = self._need_tokenizer()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, tokenizer.encode, list(texts), add_special_tokens
        )

    async def prompt_ids(self, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Token ids of prompts that are text or ids already."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self.encode(texts, True) if texts else [])
        return [next(encoded) if isinstance(p, str) else list(p) for p in prompts]

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        tokenizer = self._need_tokenizer()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads,
            lambda: tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=template_kwargs,
            ),
        )

    def requests(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        request_id: str | None,
        options: RequestOptions,
        names: Callable[[str], str],
    ) -> list[Request]:
        """One Request per choice, all of one id.

        Raises: InvalidRequest.
        """
        params.validate(self._info.vocab_size, names)
        self._check_prompt(prompt_ids, names("prompt"))
        rid = uuid.uuid4().hex if request_id is None else request_id
        tokens = array("i", prompt_ids)
        return [
            self._request(rid, index, tokens, params, sink, options) for index in range(params.n)
        ]

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("this engine runs without a tokenizer: send token ids")
        return self._tokenizer

    def _check_prompt(self, prompt_ids: Sequence[int], name: str) -> None:
        if not prompt_ids:
            raise InvalidRequest(f"{name} must hold at least one token", name)
        if len(prompt_ids) >= self._max_len:
            raise InvalidRequest(
                f"{name} has {len(prompt_ids)} tokens, at most {self._max_len - 1} fit: the "
                f"context is {self._info.max_model_len} tokens and the KV pool holds "
                f"{self._pool_tokens}, output included",
                name,
                "context_length_exceeded",
            )
        vocab_size = self._info.vocab_size
        for position, token in enumerate(prompt_ids):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{name} must hold token ids from 0 to {vocab_size - 1}, "
                    f"got {token!r} at position {position}",
                    name,
                )

    def _request(
        self,
        rid: str,
        index: int,
        tokens: array[int],
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
    ) -> Request:
        room = self._max_len - len(tokens)
        wanted = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
        seed = params.sampling_seed
        if seed is None:
            seed = self._random.getrandbits(63)
        stop_ids: frozenset[int] = frozenset()
        if not params.ignore_eos:
            eos = self._tokenizer.eos_token_ids if self._tokenizer else frozenset()
            stop_ids = eos | frozenset(params.stop_token_ids)
        return Request(
            request_id=rid,
            index=index,
            token_ids=tokens[:],
            max_len=len(tokens) + wanted,
            params=params,
            seed=_fold(seed, index),
            stop_ids=stop_ids,
            text=TextStream(self._tokenizer, params) if self._tokenizer else None,
            stream_interval=params.stream_interval or self._stream_interval,
            sink=sink,
            priority=options.priority,
            routing_key=options.routing_key,
            namespace=(options.extra_key, options.cache_salt),
        )


def _fold(seed: int, index: int) -> int:
    """hash(seed, choice index): a splitmix64 round, so that choices share no random numbers."""
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return mixed ^ (mixed >> 31)
