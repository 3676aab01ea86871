"""The engine as an async library: prompts in, deltas out.

Adds creation and the handling of texts to `EngineCore`. Knows no HTTP and no device;
`treadle.tools.compose` brings executor and tokenizer.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from treadle.engine.config import EngineConfig
from treadle.engine.core import PLAIN, EngineCore
from treadle.engine.errors import InvalidRequest
from treadle.engine.gather import Gathered
from treadle.engine.info import Parts
from treadle.engine.intake import as_prompts
from treadle.engine.interpreter import report_interpreter
from treadle.engine.options import RequestOptions
from treadle.engine.output import RequestOutput
from treadle.engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any] | None


def _compose(config: EngineConfig, since: float) -> Parts:
    """In a thread: what composes an engine imports torch, which takes a second."""
    parts: Parts = importlib.import_module("treadle.tools.compose").compose(config, since)
    return parts


def _give_back(loading: asyncio.Future[Parts]) -> None:
    """Closes an executor that nobody waits for any more."""
    if not loading.cancelled() and loading.exception() is None:
        closing = asyncio.ensure_future(loading.result().executor.close())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Future[None]] = set()  # a task that nobody holds may vanish


class Engine(EngineCore):
    """Runs on the event loop that it is created on, beside whatever else runs there.

    `create` is the usual way to make one.
    """

    @classmethod
    async def create(
        cls,
        config: EngineConfig | None = None,
        **flags: Any,
    ) -> Engine:
        """Loads a model and starts. Give a config, or its flat settings as keywords.

        Without a model_path it is the embedded model.
        Raises: ConfigError, ModelError.
        """
        since = time.perf_counter()
        chosen = EngineConfig.from_flags(flags) if config is None else config
        loading = asyncio.ensure_future(asyncio.to_thread(_compose, chosen, since))
        try:
            parts = await asyncio.shield(loading)
        except asyncio.CancelledError:  # the thread goes on: what it makes has no owner
            loading.add_done_callback(_give_back)
            raise
        report_interpreter()
        return cls(parts)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    async def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        options: RequestOptions = PLAIN,
    ) -> AsyncIterator[RequestOutput]:
        """Deltas of one request. Leaving the iteration early aborts it.

        Raises: InvalidRequest, EngineClosed.
        """
        chosen = _params(params)
        self._check_open()
        ids = (await self._intake.prompt_ids([prompt]))[0]
        deltas: asyncio.Queue[RequestOutput] = asyncio.Queue()
        rid = self.submit(ids, chosen, deltas.put_nowait, request_id=request_id, options=options)
        left = chosen.n
        try:
            while left:
                delta = await deltas.get()
                left -= delta.finish_reason is not None
                yield delta
        finally:
            if left:
                self.abort(rid)

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        request_id: str | None = None,
        options: RequestOptions = PLAIN,
    ) -> Any:
        """A Completion, or a list of them: prompt by prompt for a batch, `n` choices for each.

        prompt: text or token ids, or a list of such. params: for all, or one per prompt.
        Cancelling it aborts what it started.
        Raises: InvalidRequest, EngineClosed.
        """
        is_batch, prompts = as_prompts(prompt)
        many = isinstance(params, (list, tuple))
        each = [_params(p) for p in params] if many else [_params(params)] * len(prompts)  # type: ignore[union-attr,arg-type]
        if len(each) != len(prompts):
            raise InvalidRequest(
                f"{len(each)} sampling parameters for {len(prompts)} prompts", "sampling_params"
            )
        self._check_open()
        prompt_ids = await self._intake.prompt_ids(prompts)
        gathered = Gathered(self)
        try:
            await gathered.submit_all(prompt_ids, each, request_id, options)
            completions = await gathered.wait()
        finally:
            gathered.abandon()
        return completions if is_batch or each[0].n > 1 else completions[0]


def _params(params: Params) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        return SamplingParams.from_mapping(params)
    params.check_types()
    return params
