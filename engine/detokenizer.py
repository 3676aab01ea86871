"""Turns a stream of token ids into text that never breaks a character. Knows no stop strings.

Tokens are bytes: the text is their UTF-8 reading, so an answer begins as a continuation of its
prompt (a SentencePiece token keeps its leading space) and no earlier token is decoded again.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from treadle.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one choice. Any chunking of the same ids gives the same text.

    At most the bytes of one unfinished character (3) are held back; bytes that can no longer
    become a character come out as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._tail = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete."""
        pieces, skipped = [self._tail], self._skipped
        for token_id in token_ids:
            if token_id not in skipped:
                pieces.append(self._bytes_of(token_id))
        data = b"".join(pieces)
        text, used = utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def finish(self) -> str:
        """What was held back, as far as it can be read."""
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return text
