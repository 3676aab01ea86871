"""A synchronous front for scripts, in the shape of SGLang's `Engine`.

Knows the async engine's public API; owns a thread with an event loop to run it on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from treadle.engine.engine import Engine, Params, Prompt
from treadle.engine.errors import EngineClosed, InvalidRequest
from treadle.engine.native_answer import native_answer
from treadle.engine.output import Completion
from treadle.engine.sampling_params import SamplingParams

T = TypeVar("T")
Answer = dict[str, Any]


class SyncEngine:
    """Blocks the calling thread; may be called from several threads at once.

    with SyncEngine(model_path=...) as engine:
        engine.generate(["Hello"], {"max_new_tokens": 16})
    """

    def __init__(self, **flags: Any) -> None:
        """flags: the settings that `Engine.create` takes.

        Raises: ConfigError, ModelError.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="treadle-engine", daemon=True
        )
        self._thread.start()
        try:
            self._engine: Engine | None = self._run(Engine.create(**flags))
        except BaseException:
            self._stop_loop()
            raise

    def __enter__(self) -> SyncEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
    ) -> Any:
        """A dictionary with text, output_ids and meta_info; a list of them for a batch or n > 1.

        stream: an iterator over the dictionaries of one prompt, each with the text so far.
        Raises: InvalidRequest, EngineClosed.
        """
        if (prompt is None) == (input_ids is None):
            raise InvalidRequest("give either prompt or input_ids", "prompt")
        given: Any = input_ids if prompt is None else prompt
        if stream:
            return self._stream(given, sampling_params)
        started = time.perf_counter()
        engine = self._need_engine()
        answers = self._run(engine.generate(given, sampling_params))
        elapsed = time.perf_counter() - started
        if isinstance(answers, Completion):
            return native_answer(answers, elapsed)
        return [native_answer(answer, elapsed) for answer in answers]

    def release_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Gives memory back to the system: `weights`, `kv_cache`, `cuda_graph`; None: all of it.

        Calls for answers wait until it is resumed, those under way too.
        Raises: InvalidRequest for an unknown tag or when the device cannot; EngineClosed.
        """
        self._run(self._need_engine().release_memory_occupation(tags))

    def resume_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Takes memory again; everything goes on once all of it is back.

        Raises: InvalidRequest for an unknown tag, EngineClosed; what kept the device from it.
        """
        self._run(self._need_engine().resume_memory_occupation(tags))

    def shutdown(self) -> None:
        """Aborts what runs and gives everything back. Idempotent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._run(engine.shutdown())
            self._stop_loop()

    def _need_engine(self) -> Engine:
        if self._engine is None:
            raise EngineClosed("the engine was shut down")
        return self._engine

    def _stream(self, prompt: Prompt, params: Any) -> Iterator[Answer]:
        chosen = SamplingParams() if params is None else params
        if isinstance(chosen, Mapping):
            chosen = SamplingParams.from_mapping(chosen)
        if chosen.n != 1:
            raise InvalidRequest("streaming takes one choice: n must be 1", "sampling_params.n")
        started = time.perf_counter()
        so_far = Completion("", 0)
        deltas = self._need_engine().stream(prompt, chosen)
        try:
            while True:
                delta = self._run(_next(deltas))
                if delta is None:
                    return
                so_far.request_id = delta.request_id
                so_far.add(delta)
                yield native_answer(so_far, time.perf_counter() - started)
        finally:
            self._run(_close(deltas))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(deltas: AsyncIterator[Any]) -> Any:
    return await anext(deltas, None)


async def _close(deltas: Any) -> None:
    await deltas.aclose()
