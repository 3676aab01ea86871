"""What the server asks of an engine. Knows no wire format.

`treadle.engine.engine.Engine` is the real one; tests bring a fake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from treadle.engine.info import EngineInfo, EngineLoad
from treadle.engine.options import RequestOptions
from treadle.engine.output import Sink
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.tokenizer import Tokenizer


class ServedEngine(Protocol):
    """All methods are called on the event loop's thread; `Engine` says what each one promises."""

    info: EngineInfo
    tokenizer: Tokenizer | None

    @property
    def is_ready(self) -> bool: ...

    @property
    def lost(self) -> asyncio.Event: ...

    @property
    def released_memory(self) -> Sequence[str]: ...

    async def is_healthy(self, timeout: float = ...) -> bool: ...

    def load(self) -> EngineLoad: ...

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool = ...
    ) -> list[list[int]]: ...

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        continue_final_message: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
        template_kwargs: Mapping[str, Any] | None = ...,
    ) -> str: ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        *,
        request_id: str | None = ...,
        options: RequestOptions = ...,
        names: Callable[[str], str] = ...,
    ) -> str: ...

    def abort(self, request_id: str) -> None: ...

    def abort_all(self) -> None: ...

    async def flush_cache(self, timeout: float = ...) -> int: ...

    async def release_memory_occupation(self, tags: Collection[str] | None = ...) -> None: ...

    async def resume_memory_occupation(self, tags: Collection[str] | None = ...) -> None: ...
