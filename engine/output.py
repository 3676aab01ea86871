"""What a request yields: deltas while it runs, one folded answer at the end. Knows no transport.

The folded answer is the concatenation of the deltas, never computed another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended.

    matched: the stop string or the stop token id that ended it, None otherwise.
    message, status_code: set for an abort that is the engine's doing (status as in HTTP).
    """

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None
    message: str | None = None
    status_code: int | None = None


@dataclass(slots=True)  # not frozen: one is made per token, and that would triple its cost
class RequestOutput:
    """One delta of one choice. Counts are cumulative; the last delta carries finish_reason."""

    request_id: str
    index: int  # choice, 0..n-1
    text: str  # new text; may be empty while a character or a stop string is incomplete
    token_ids: list[int]  # new tokens, every generated one exactly once
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None = None
    num_retractions: int = 0


Sink = Callable[[RequestOutput], None]
"""Takes one delta, on the loop's thread. Must not block; what it raises aborts the request."""


@dataclass(slots=True)
class Completion:
    """One choice, folded."""

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    num_retractions: int = 0

    def add(self, delta: RequestOutput) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.prompt_tokens = delta.prompt_tokens
        self.completion_tokens = delta.completion_tokens
        self.cached_tokens = delta.cached_tokens
        self.finish_reason = delta.finish_reason
        self.num_retractions = delta.num_retractions
