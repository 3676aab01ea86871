"""Token counts of one call. Knows no wire format and no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Usage:
    """A prompt counts once, however many choices continue it."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
