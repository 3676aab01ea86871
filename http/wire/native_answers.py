"""The answers of `/generate`, whole and as events. Knows no request and no connection."""

from __future__ import annotations

import time
from collections.abc import Sequence

import orjson

from treadle.engine.native_answer import meta_info, native_answer
from treadle.engine.output import Completion, RequestOutput
from treadle.http.sse import DONE
from treadle.http.wire.openai_answers import failure_event


class NativeAnswers:
    """Events carry the text so far, or only what is new if `is_incremental`."""

    def __init__(self, *, is_list: bool, is_incremental: bool, weight_version: str) -> None:
        """is_list: the call has several choices; they come as a list and events have an index."""
        self._is_list = is_list
        self._is_incremental = is_incremental
        self._weight_version = weight_version
        self._start = time.perf_counter()
        self._so_far: dict[int, tuple[bytearray, bytearray]] = {}  # text and ids, as JSON

    def events(self, choice: int, delta: RequestOutput) -> bytes:
        """One event, also for a delta without text: its tokens count."""
        reason = delta.finish_reason
        failure = failure_event(reason) if reason is not None else b""
        if failure:
            return failure
        text, ids = orjson.dumps(delta.text)[1:-1], orjson.dumps(delta.token_ids)[1:-1]
        if not self._is_incremental:
            text, ids = self._append(choice, text, ids)
        meta = orjson.dumps(meta_info(delta, self._elapsed_s(), self._weight_version))
        index = b',"index":%d' % choice if self._is_list else b""
        return b'data: {"text":"%b","output_ids":[%b],"meta_info":%b%b}\n\n' % (
            text, ids, meta, index,
        )  # fmt: skip

    def _append(self, choice: int, text: bytes, ids: bytes) -> tuple[bytes, bytes]:
        all_text, all_ids = self._so_far.setdefault(choice, (bytearray(), bytearray()))
        all_text += text
        if ids:
            all_ids += b"," + ids if all_ids else ids
        return bytes(all_text), bytes(all_ids)

    def end(self) -> bytes:
        return DONE

    def answer(self, choices: Sequence[Completion]) -> bytes:
        elapsed_s = self._elapsed_s()
        answers = [native_answer(choice, elapsed_s, self._weight_version) for choice in choices]
        return orjson.dumps(answers if self._is_list else answers[0])

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._start
