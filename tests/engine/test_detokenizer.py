"""The incremental detokenizer: whole characters, any chunking, the library's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from treadle.engine.detokenizer import IncrementalDetokenizer
from treadle.engine.hf_tokenizer import HfTokenizer
from treadle.engine.tokenizer import Tokenizer

SPECIAL = 256


class ByteTokenizer:
    """Token i is the byte i; 256 is special."""

    special_token_ids = frozenset({SPECIAL})

    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == SPECIAL else bytes([token_id]) if token_id < 256 else b""


def detokenizer(skip_special_tokens: bool = True) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(cast(Tokenizer, ByteTokenizer()), skip_special_tokens)


def chunks_of(data: st.DataObject, items: Sequence[Any]) -> list[Sequence[Any]]:
    cuts = data.draw(st.lists(st.integers(0, len(items)), max_size=8).map(sorted))
    edges = [0, *cuts, len(items)]
    return [items[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@settings(deadline=None)
@given(st.binary(max_size=60), st.data())
def test_any_bytes_any_chunking_read_like_the_whole(raw: bytes, data: st.DataObject) -> None:
    stream = detokenizer()
    text = "".join(stream.push(chunk) for chunk in chunks_of(data, list(raw)))
    assert text + stream.finish() == raw.decode("utf-8", "replace")
    assert stream.finish() == ""


@settings(deadline=None)
@given(st.text(max_size=30))
def test_characters_come_out_as_soon_as_they_are_whole(text: str) -> None:
    stream, seen = detokenizer(), b""
    out = ""
    for byte in text.encode():
        seen += bytes([byte])
        out += stream.push([byte])
        assert out == seen.decode("utf-8", "ignore")
    assert stream.finish() == ""


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=40))
def test_no_more_than_three_bytes_are_held(raw: bytes) -> None:
    stream, out = detokenizer(), ""
    for count, byte in enumerate(raw, 1):
        out += stream.push([byte])
        held = next(n for n in range(4) if raw[: count - n].decode("utf-8", "replace") == out)
        assert held <= 3


def test_broken_character_becomes_replacement_without_waiting_for_the_end() -> None:
    stream = detokenizer()
    assert stream.push([0xE4, 0xBD]) == ""
    assert stream.push([ord("A")]) == "\ufffdA"
    assert stream.push([0xFF]) == "\ufffd"
    assert stream.push([0xF0, 0x9F]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_left_out_or_shown() -> None:
    first, second = "é".encode()
    assert detokenizer().push([65, SPECIAL, 66]) == "AB"
    assert detokenizer(skip_special_tokens=False).push([65, SPECIAL, 66]) == "A<s>B"
    assert detokenizer().push([first, SPECIAL, second]) == "é"


def test_ids_without_a_meaning_add_nothing() -> None:
    assert detokenizer().push([65, 999, 66]) == "AB"


@settings(deadline=None)
@given(st.text(alphabet="ab é你😀\n", max_size=20), st.data())
def test_sentencepiece_text_equals_the_librarys_after_its_first_space(
    text: str, data: st.DataObject
) -> None:
    pieces = ["▁", "a", "b", "▁a", "\n", "ab"] + [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = HfTokenizer(backend, eos_token_ids=frozenset(), bos_token_id=None, templates={})
    ids = [
        i
        for char in text
        for i in ([pieces.index(char)] if char in pieces else [byte + 6 for byte in char.encode()])
    ]
    stream = IncrementalDetokenizer(tokenizer)
    out = "".join(stream.push(chunk) for chunk in chunks_of(data, ids)) + stream.finish()
    assert out == backend.decode(ids) == text
