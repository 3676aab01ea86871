"""GGUF vocabularies: both kinds, every pre-tokenizer's cuts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from treadle.engine.errors import ModelError
from treadle.engine.gguf_vocab import GgufVocab, gguf_eos_ids, read_gguf_vocab
from treadle.graphs.weights.gguf_file import read_metadata
from treadle.tools.tokenizer_source import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
CORPUS = ["the quick brown fox isn't 12345 don't\n\n  return x  ", "Größe 你好 😀 été naïve"] * 9
TEXTS = [
    "Hello, world!", "12345 and 1 000 000", "don't DON'T we'll", "  lead  and   trail   ",
    "tabs\t\tand\nlines\r\n\r\nend", "é ñ ü 你好 世界", "😀 👨‍👩‍👧 🏳️‍🌈", "x=1;y[2]={'a':3}", "٣½Ⅷ",
    "a <|end|> b<|end|>", "", " ", "\u00a0\u200b", "\x00\x7f",
]  # fmt: skip

MakeGguf = Callable[..., Path]


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """make_gguf(**keys of tokenizer.ggml) writes a GGUF file without tensors."""

    def make(chat_template: Any = None, **keys: Any) -> Path:
        path = tmp_path / f"{random.random()}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in keys.items():
            name = f"tokenizer.ggml.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            else:
                writer.add_string(name, value)
        if chat_template is not None:
            writer.add_chat_template(chat_template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return make


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """tokens and merges of a byte-level BPE, with three control tokens in front."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|begin|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    model = json.loads(backend.to_str())["model"]
    return {
        "tokens": sorted(model["vocab"], key=model["vocab"].__getitem__),
        "merges": [" ".join(merge) for merge in model["merges"]],
        "token_type": [CONTROL] * 3 + [NORMAL] * (len(model["vocab"]) - 3),
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def library_tokenizer(trained: dict[str, Any], pre: pre_tokenizers.PreTokenizer) -> Backend:
    """The same vocabulary, put together by hand."""
    vocab = {token: i for i, token in enumerate(trained["tokens"])}
    merges = [(m.split(" ")[0], m.split(" ")[1]) for m in trained["merges"]]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>", "<|pad|>"])
    return backend


def load_gguf_vocab(path: Path) -> GgufVocab:
    return read_gguf_vocab(read_metadata(path), path.name)


def ids_of(vocab: GgufVocab, text: str, add_special_tokens: bool = False) -> list[int]:
    return vocab.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    ("pre", "library"),
    [
        ("gpt-2", BYTE_LEVEL),
        ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTE_LEVEL])),
    ],
)
def test_byte_level_equals_the_librarys_own_parts(
    make_gguf: MakeGguf, trained: dict[str, Any], pre: str, library: pre_tokenizers.PreTokenizer
) -> None:
    expected = library_tokenizer(trained, library)
    vocab = load_gguf_vocab(make_gguf(model="gpt2", pre=pre, **trained))
    rng = random.Random()
    mixed = ["".join(rng.choices(TEXTS, k=4)) for _ in range(200)]
    for text in TEXTS + mixed:
        ids = ids_of(vocab, text)
        assert ids == expected.encode(text).ids, text
        assert vocab.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "don't 12345  x", ["don", "'t", " 12345", " ", " x"]),
        ("smollm", "a 12  x", ["a", " ", "1", "2", " ", " x"]),
        ("starcoder", "v10", ["v", "1", "0"]),
        ("command-r", " 7!", [" ", "7", "!"]),
        ("llama-bpe", "DON'T 1234567\n\nx", ["DON", "'T", " ", "123", "456", "7", "\n\n", "x"]),
        ("qwen2", "we'LL (go) 123", ["we", "'LL", " (", "go", ")", " ", "1", "2", "3"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-llm", "a\nb 12 你好", ["a", "\n", "b", " ", "12", " ", "你好"]),
        ("deepseek-coder", "a, b12", ["a", ",", " b", "1", "2"]),
        ("deepseek-v3", "ab 1234你好", ["ab", " ", "123", "4", "你好"]),
        ("falcon", "x+1234", ["x", "+", "123", "4"]),
        ("viking", "a 12, b", ["a", " ", "1", "2", ",", " b"]),
        ("default", "x=12345 ", ["x", "=", "123", "45", " "]),
    ],
)
def test_pre_tokenizer_cuts_as_its_models_were_trained(
    make_gguf: MakeGguf, trained: dict[str, Any], pre: str, text: str, pieces: list[str]
) -> None:
    cutter = load_gguf_vocab(make_gguf(model="gpt2", pre=pre, **trained)).tokenizer.pre_tokenizer
    raw = text.encode()
    found = []
    offset = 0
    for piece, _ in cutter.pre_tokenize_str(text):
        found.append(raw[offset : offset + len(piece)].decode())  # one character a byte
        offset += len(piece)
    assert found == pieces


@pytest.mark.parametrize("pre", ["from-the-future", ""])
def test_unknown_pre_tokenizer_warns_and_cuts_in_the_default_way(
    make_gguf: MakeGguf, trained: dict[str, Any], pre: str, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = load_gguf_vocab(make_gguf(model="gpt2", pre=pre, **trained))
    assert f"pre-tokenizer {pre!r} is unknown" in caplog.text
    caplog.clear()
    default = load_gguf_vocab(make_gguf(model="gpt2", pre="default", **trained))
    assert not caplog.text
    for text in TEXTS:
        assert ids_of(unknown, text) == ids_of(default, text)


def test_whole_words_come_before_merges_where_llama_3_wants_it(make_gguf: MakeGguf) -> None:
    keys = {"tokens": ["a", "b", "c", "ab", "bc", "abc"], "merges": ["b c"], "model": "gpt2"}
    assert ids_of(load_gguf_vocab(make_gguf(pre="llama-bpe", **keys)), "abc") == [5]
    assert ids_of(load_gguf_vocab(make_gguf(pre="gpt-2", **keys)), "abc") == [0, 4]


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("gpt-2", {}, [7]),
        ("gpt-2", {"add_bos_token": True}, [0, 7]),
        ("llama-bpe", {}, [0, 7]),
        ("llama-bpe", {"add_bos_token": False}, [7]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [0, 7, 1]),
    ],
)
def test_special_tokens_are_added_as_the_file_or_its_kind_says(
    make_gguf: MakeGguf,
    trained: dict[str, Any],
    pre: str,
    flags: dict[str, bool],
    expected: list[int],
) -> None:
    vocab = load_gguf_vocab(make_gguf(model="gpt2", pre=pre, **trained, **flags))
    text = vocab.tokenizer.decode([7])
    assert ids_of(vocab, text, add_special_tokens=True) == expected


def test_user_defined_tokens_are_found_whole_and_are_not_special(make_gguf: MakeGguf) -> None:
    tokens = ["<think>", "<|end|>", "t", "h", "i", "n", "k", "<", ">", "Ġ", " é "]
    kinds = [USER, CONTROL] + [NORMAL] * 8 + [USER]
    path = make_gguf(model="gpt2", pre="gpt-2", tokens=tokens, merges=["t h"][:0], token_type=kinds)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(["<think>think é <|end|>"], False)[0]
    assert ids == [0, 2, 3, 4, 5, 6, 10, 1]
    assert tokenizer.special_token_ids == {1}
    assert tokenizer.decode(ids) == "<think>think é "
    assert tokenizer.token_bytes(10) == " é ".encode()


def test_special_texts_ends_and_templates_are_reported(
    make_gguf: MakeGguf, trained: dict[str, Any]
) -> None:
    tokens = [*trained["tokens"], "<|im_end|>", "<|eom_id|>", "<EOT>", "<x>"]
    kinds = [*trained["token_type"], CONTROL, CONTROL, NORMAL, CONTROL]
    count = len(trained["tokens"])
    keys = trained | {"tokens": tokens, "token_type": kinds, "eot_token_id": count + 3}
    path = make_gguf(
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "tools"},
        ],
        model="gpt2",
        pre="qwen2",
        padding_token_id=2,
        **keys,
    )
    vocab = load_gguf_vocab(path)
    ends = {1, count, count + 1, count + 3}
    assert vocab.eos_token_ids == ends == gguf_eos_ids(read_metadata(path))
    assert vocab.bos_token_id == 0
    assert vocab.special_tokens == {
        "bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"
    }  # fmt: skip
    assert vocab.chat_templates == {"default": "plain", "tool_use": "tools"}


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "abc", "ca", "aa", "▁b", "cab", "é"]


def sentencepiece_keys(scores: list[float], **more: Any) -> dict[str, Any]:
    head = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES)
    return {
        "model": "llama",
        "tokens": head + PIECES,
        "token_type": kinds,
        "scores": [0.0] * len(head) + scores,
        **more,
    }


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's algorithm, word for word: join the best neighbours until none fit."""
    symbols = list(text)
    while True:
        pairs = [
            (scores[left + right], -i)
            for i, (left, right) in enumerate(zip(symbols, symbols[1:], strict=False))
            if left + right in scores
        ]
        if not pairs:
            return symbols
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@settings(deadline=None, max_examples=60)
@given(
    order=st.permutations(range(len(PIECES))),
    text=st.text(alphabet="abc é日 ", min_size=1, max_size=14),
)
def test_sentencepiece_joins_the_best_scored_neighbours(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], text: str
) -> None:
    make = make_gguf.__wrapped__  # type: ignore[attr-defined]  # a fixture is made once a test
    path = make(tmp_path_factory.mktemp("spm"))(**sentencepiece_keys([-float(i) for i in order]))
    vocab = load_gguf_vocab(path)
    scores = {piece: -float(i) for piece, i in zip(PIECES, order, strict=True)}
    expected = []
    for symbol in merge_by_score("▁" + text.replace(" ", "▁"), scores):
        known = [259 + PIECES.index(symbol)] if symbol in scores else []
        expected += known or [3 + byte for byte in symbol.encode()]
    ids = ids_of(vocab, text)
    assert ids == expected
    assert vocab.tokenizer.decode(ids) == text


def test_sentencepiece_adds_bos_and_a_space_unless_told_otherwise(make_gguf: MakeGguf) -> None:
    scores = [-float(i) for i in range(len(PIECES))]
    a, space_a = 259 + PIECES.index("a"), 259 + PIECES.index("▁a")
    vocab = load_gguf_vocab(make_gguf(**sentencepiece_keys(scores)))
    assert ids_of(vocab, "a", add_special_tokens=True) == [1, space_a]
    assert ids_of(vocab, "a</s>a") == [space_a, 2, space_a]
    assert vocab.tokenizer.decode([space_a, space_a]) == "a a"
    assert vocab.eos_token_ids == {2}
    bare = load_gguf_vocab(
        make_gguf(**sentencepiece_keys(scores, add_space_prefix=False, add_bos_token=False))
    )
    assert ids_of(bare, "a", add_special_tokens=True) == [a]
    assert bare.tokenizer.decode([space_a, space_a]) == " a a"


def test_sentencepiece_tokens_continue_a_text_with_their_space(make_gguf: MakeGguf) -> None:
    tokenizer = load_tokenizer(make_gguf(**sentencepiece_keys([0.0] * len(PIECES))))
    space_a = 259 + PIECES.index("▁a")
    assert tokenizer.token_bytes(space_a) == b" a"
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.token_bytes(2) == b"</s>"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_vocabulary_that_cannot_be_used_says_why(
    make_gguf: MakeGguf, tmp_path: Path, trained: dict[str, Any]
) -> None:
    with pytest.raises(ModelError, match=r"'bert'.*supported are 'gpt2', 'llama'.*tokenizer-path"):
        load_gguf_vocab(make_gguf(model="bert", tokens=["a"]))
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_gguf_vocab(make_gguf())
    with pytest.raises(ModelError, match="do not agree"):
        load_gguf_vocab(make_gguf(model="gpt2", pre="gpt-2", tokens=["a"], merges=["a b"]))
    assert gguf_eos_ids(read_metadata(make_gguf())) == frozenset()


@pytest.mark.model
def test_smollm2_equals_transformers_but_for_digits(smollm2_gguf: Path) -> None:
    """The original cuts digits one by one before all else; transformers' conversion does not."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    tokenizer = load_tokenizer(smollm2_gguf)
    rng = random.Random()
    texts = ["".join(rng.choices(TEXTS, k=5)) for _ in range(300)]
    for text in TEXTS + texts:
        ids = tokenizer.encode([text], False)[0]
        assert tokenizer.decode(ids, False) == text
        if not any(char.isnumeric() for char in text):
            assert ids == other.encode(text, add_special_tokens=False), text
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), BYTE_LEVEL]
    )
    for text in texts:
        assert tokenizer.encode([text], True)[0] == other.encode(text), text
    assert tokenizer.eos_token_ids == {0, 2} and tokenizer.vocab_size == 49152
