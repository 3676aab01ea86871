"""Tokens of one choice to text that may go out: detokenizer, then stop strings.

Knows no request and no transport. Each stage holds back only what could still become its marker.
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.engine.detokenizer import IncrementalDetokenizer
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.stops import StopMatcher
from treadle.engine.tokenizer import Tokenizer


class TextStream:
    """`matched` is the stop string that was found; nothing comes out after it."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, params.no_stop_trim) if params.stop else None
        self.has_stops = self._stops is not None
        self.matched: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that may go out."""
        text = self._detokenizer.push(token_ids)
        return text if self._stops is None else self._match(text, self._stops)

    def finish(self) -> str:
        """What was held back, at the end of the tokens."""
        text = self._detokenizer.finish()
        if self._stops is not None:
            text = self._match(text, self._stops)
            if self.matched is None:
                text += self._stops.finish()
        return text

    def _match(self, text: str, stops: StopMatcher) -> str:
        if self.matched is not None:
            return ""
        text, self.matched = stops.push(text)
        return text
