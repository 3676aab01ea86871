"""The answers of `/generate`, whole and as events. Knows no request and no connection."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson

from treadle.engine.output import Completion, FinishReason, RequestOutput
from treadle.http.sse import DONE
from treadle.http.wire.openai_answers import ABORTED, failure_event


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
        meta = orjson.dumps(self._meta(delta))
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
        answers = [
            {"text": choice.text, "output_ids": choice.token_ids, "meta_info": self._meta(choice)}
            for choice in choices
        ]
        return orjson.dumps(answers if self._is_list else answers[0])

    def _meta(self, output: RequestOutput | Completion) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": output.request_id,
            "finish_reason": None,
            "prompt_tokens": output.prompt_tokens,
            "weight_version": self._weight_version,
            "num_retractions": 0,
            "dp_rank": None,
            "reasoning_tokens": 0,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
        }
        if output.finish_reason is not None:
            meta["finish_reason"] = _reason(output.finish_reason, output.completion_tokens)
            meta["e2e_latency"] = time.perf_counter() - self._start
        return meta


def _reason(reason: FinishReason, completion_tokens: int) -> dict[str, Any]:
    match reason.type:
        case "stop":
            return {"type": "stop", "matched": reason.matched}
        case "length":
            return {"type": "length", "length": completion_tokens}
        case "abort":
            return {"type": "abort", "message": reason.message or ABORTED, "status_code": None,
                    "err_type": None}  # fmt: skip
