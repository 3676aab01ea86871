"""The answers of `/v1/chat/completions` and `/v1/completions`, whole and as events.

Knows no request and no connection. The constant part of an event is built once per choice.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from treadle.engine.native_answer import ABORTED
from treadle.engine.output import Completion, FinishReason, RequestOutput
from treadle.http.errors import error_object
from treadle.http.sse import DONE
from treadle.http.wire.usage import Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What every answer of a call repeats."""

    id: str
    model: str
    weight_version: str
    shows_cached: bool  # usage carries prompt_tokens_details
    include_usage: bool = False  # a last event with the usage
    continuous_usage: bool = False  # usage on every event


class _Answers(ABC):
    """What chat and text completions share."""

    kind: str  # `object` of an answer
    event_kind: str  # and of an event

    def __init__(self, head: Head, usage: Usage) -> None:
        """usage: read when an answer or an event is made."""
        self._head = head
        self._usage = usage
        self._common = {"id": head.id, "created": int(time.time()), "model": head.model}
        start = orjson.dumps({**self._common, "object": self.event_kind})
        self._start = b"data: " + start[:-1] + b',"choices":['
        self._seen: set[int] = set()

    def usage(self) -> dict[str, Any]:
        usage = self._usage
        cached = {"cached_tokens": usage.cached_tokens} if self._head.shows_cached else None
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": cached,
        }

    def end(self) -> bytes:
        if not self._head.include_usage:
            return DONE
        return self._start + b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n" + DONE

    def answer(self, choices: Sequence[Completion]) -> bytes:
        return orjson.dumps(
            {
                **self._common,
                "object": self.kind,
                "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
                "usage": self.usage(),
                "metadata": {"weight_version": self._head.weight_version},
            }
        )

    @abstractmethod
    def _choice(self, index: int, choice: Completion) -> dict[str, Any]: ...

    def _event(self, choice: bytes) -> bytes:
        """One event with one choice, given as JSON."""
        if self._head.continuous_usage:
            tail = b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n"
        elif self._head.include_usage:
            tail = b'],"usage":null}\n\n'
        else:
            tail = b"]}\n\n"
        return self._start + choice + tail


class ChatAnswers(_Answers):
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def events(self, choice: int, delta: RequestOutput) -> bytes:
        """Role, text and finish of a choice, as far as this delta brings them."""
        events = b""
        index = b'{"index":%d,' % choice
        if choice not in self._seen:
            self._seen.add(choice)
            events = self._event(index + b'"delta":{"role":"assistant","content":""}' + _UNFINISHED)
        if delta.text:
            text = orjson.dumps(delta.text)
            events += self._event(index + b'"delta":{"content":' + text + b"}" + _UNFINISHED)
        if delta.finish_reason is not None:
            events += failure_event(delta.finish_reason) or self._event(
                index + b'"delta":{}' + _finished(delta.finish_reason)
            )
        return events

    def _choice(self, index: int, choice: Completion) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": choice.text,
            "reasoning_content": None,
            "tool_calls": None,
        }
        return {"index": index, "message": message, "logprobs": None, **_ending(choice)}


class CompletionAnswers(_Answers):
    kind = "text_completion"
    event_kind = "text_completion"

    def __init__(self, head: Head, usage: Usage, echo: Callable[[int], str] | None) -> None:
        """echo: the text that stands before a choice's own."""
        super().__init__(head, usage)
        self._echo = echo

    def events(self, choice: int, delta: RequestOutput) -> bytes:
        """Text and finish of a choice; nothing while a character or a stop is incomplete."""
        text = delta.text
        if self._echo is not None and choice not in self._seen:
            self._seen.add(choice)
            text = self._echo(choice) + text
        reason = delta.finish_reason
        if not text and reason is None:
            return b""
        failure = failure_event(reason) if reason is not None else b""
        if failure and not text:
            return failure
        ending = _UNFINISHED if reason is None or failure else _finished(reason)
        start = b'{"index":%d,"text":' % choice
        return self._event(start + orjson.dumps(text) + ending) + failure

    def _choice(self, index: int, choice: Completion) -> dict[str, Any]:
        text = choice.text if self._echo is None else self._echo(index) + choice.text
        return {"index": index, "text": text, "logprobs": None, **_ending(choice)}


_UNFINISHED = b',"logprobs":null,"finish_reason":null,"matched_stop":null}'


def _finished(reason: FinishReason) -> bytes:
    matched = orjson.dumps(reason.matched)
    kind = reason.type.encode()
    return b',"logprobs":null,"finish_reason":"%b","matched_stop":%b}' % (kind, matched)


def _ending(choice: Completion) -> dict[str, Any]:
    reason = choice.finish_reason
    assert reason is not None, "folded before its end"
    return {"finish_reason": reason.type, "matched_stop": reason.matched}


def failure_event(reason: FinishReason) -> bytes:
    """An event for what went wrong in the engine; nothing for an ordinary end."""
    if reason.status_code is None:
        return b""
    error = error_object(reason.status_code, reason.message or ABORTED, code=reason.status_code)
    return b"data: " + error + b"\n\n"
