"""The bytes that each token of a vocabulary adds to a text. Knows no chat and no stream.

Byte-level and SentencePiece vocabularies are read by their rules; any other decoder is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

_SENTENCEPIECE_STEPS = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, found when first asked for: a start-up pays for none."""

    def __init__(
        self, backend: Tokenizer, added: Mapping[int, AddedToken], vocab_size: int
    ) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._read = _piece_reader(backend, added)

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._vocab_size:
            return b""
        piece = self._backend.id_to_token(token_id)
        if piece is None:  # a hole in the vocabulary
            return b""
        found = self[token_id] = self._read(token_id, piece)
        return found


def _piece_reader(
    backend: Tokenizer, added: Mapping[int, AddedToken]
) -> Callable[[int, str], bytes]:
    """How a vocabulary's pieces become bytes, from the steps of its decoder."""
    steps = list(_decoder_steps(backend))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return _byte_level_reader(added)
    has_regex = any("Regex" in step.get("pattern", ()) for step in steps)
    if kinds and kinds <= _SENTENCEPIECE_STEPS and not has_regex:
        return _sentencepiece_reader(steps)
    return _reader_by_trial(backend)


def _decoder_steps(backend: Tokenizer) -> Iterator[dict[str, Any]]:
    if backend.decoder is None:
        return
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            yield step


def _byte_level_reader(added: Mapping[int, AddedToken]) -> Callable[[int, str], bytes]:
    byte_of = _byte_alphabet()

    def read(token_id: int, piece: str) -> bytes:
        if token_id in added or not piece or not byte_of.keys() >= set(piece):
            return piece.encode()
        return bytes(byte_of[char] for char in piece)

    return read


def _sentencepiece_reader(steps: Sequence[Mapping[str, Any]]) -> Callable[[int, str], bytes]:
    """Spaces are spelled in another character; `<0xNN>` is a byte. A stripped first space counts
    as text here, since what a token adds is asked for."""
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
    swaps = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]
    swaps += [(s["replacement"], " ") for s in steps if s["type"] == "Metaspace"]

    def read(token_id: int, piece: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(match[1])
        for old, new in swaps:
            piece = piece.replace(old, new)
        return piece.encode()

    return read


def _reader_by_trial(backend: Tokenizer) -> Callable[[int, str], bytes]:
    """For any other decoder: what a token adds behind a plain word."""
    size = backend.get_vocab_size()
    anchor = next((i for i in range(size) if backend.decode([i]).isalpha()), 0)
    before = backend.decode([anchor])

    def read(token_id: int, piece: str) -> bytes:
        both = backend.decode([anchor, token_id], skip_special_tokens=False)
        text = both.removeprefix(before) if both.startswith(before) else piece
        return text.encode()

    return read


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + i): byte for i, byte in enumerate(hidden)
    }
