"""Builds a tokenizer from a GGUF file's metadata. Knows nothing of files, models or chats.

What a vocabulary means (pre-tokenizers, special tokens, ends of generation) follows llama.cpp,
which defines these keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from treadle.engine.errors import ModelError

logger = logging.getLogger(__name__)

Metadata = Mapping[str, Any]  # the keys and values of a file

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# Control tokens that end a generation though no key says so.
_END_TEXTS = frozenset(
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
     "<EOT>", "<|end_of_text|>"]
)  # fmt: skip

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+{_TAIL}"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}|", r"\p{N}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    r"ὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    r"ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# tokenizer.ggml.pre -> the patterns that cut the text, one after the other.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "mpt", "olmo", "phi-2", "jais", "gigachat", "mellum", "exaone4", "trillion",
         "a.x-4.0", "granite-docling"),
        (_GPT2,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
         "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"),
        (_QWEN2,),
    ),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+{_TAIL}",
    ),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+{_TAIL}",
        ),
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), (r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
}  # fmt: skip

# Whole words in the vocabulary are taken before any merge, and a beginning-of-text token is added.
_WHOLE_WORDS = frozenset(
    ["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "tekken"]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """What a GGUF file says about text."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, unk_token, pad_token, sep_token
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    chat_templates: dict[str, str]  # by name; the plain one is "default"


def read_gguf_vocab(metadata: Metadata, origin: str) -> GgufVocab:
    """What a GGUF file's keys and values say about text.

    origin: the file, for messages.
    Raises: ModelError when they hold no vocabulary, or one of another kind or at odds with itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata or kind not in _BUILDERS:
        raise ModelError(
            f"{origin} holds no tokenizer that can be used here: tokenizer.ggml.model is {kind!r}, "
            f"supported are {', '.join(map(repr, _BUILDERS))}; name a folder with --tokenizer-path"
        )
    vocab = _Vocab(metadata)
    try:
        tokenizer = _BUILDERS[kind](vocab)
        tokenizer.add_special_tokens(vocab.added(_CONTROL) + vocab.added(_UNKNOWN))
        tokenizer.add_tokens(vocab.added(_USER_DEFINED))
        tokenizer.post_processor = vocab.post_processor()
    except Exception as error:  # the library raises bare exceptions for tables that do not agree
        raise ModelError(f"{origin}: the tokenizer's tables do not agree: {error}") from error
    return GgufVocab(
        tokenizer=tokenizer,
        special_tokens=vocab.special_tokens(),
        bos_token_id=vocab.token_id("bos"),
        eos_token_ids=vocab.end_ids(),
        chat_templates={
            key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": text
            for key, text in metadata.items()
            if key.startswith("tokenizer.chat_template") and isinstance(text, str)
        },
    )


def gguf_eos_ids(metadata: Metadata) -> frozenset[int]:
    """Only the ids that end a text, of a vocabulary of any kind."""
    return _Vocab(metadata).end_ids() if "tokenizer.ggml.tokens" in metadata else frozenset()


class _Vocab:
    """The tokenizer.ggml.* keys with their defaults."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self.pre: str = self.get("pre", "")
        self.is_sentencepiece = self.get("model") == "llama"
        raw: list[str] = self.get("tokens")
        self.tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(raw)]
        self.types: list[int] = self.get("token_type") or [_NORMAL] * len(self.tokens)
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def token_id(self, name: str) -> int | None:
        defaults = {"bos": 1, "eos": 2, "unknown": 0} if self.is_sentencepiece else {}
        token_id: int | None = self.get(f"{name}_token_id", defaults.get(name))
        return token_id if token_id is not None and token_id < len(self.tokens) else None

    def added(self, kind: int) -> list[AddedToken]:
        """Tokens that are found in the text before all else."""
        is_special = kind != _USER_DEFINED
        return [
            AddedToken(token, normalized=False, special=is_special)
            for token, its_kind in zip(self.tokens, self.types, strict=True)
            if its_kind == kind
        ]

    def special_tokens(self) -> dict[str, str]:
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
        found = {f"{short}_token": self.token_id(name) for short, name in names.items()}
        return {name: self.tokens[i] for name, i in found.items() if i is not None}

    def end_ids(self) -> frozenset[int]:
        named = {self.token_id(name) for name in ("eos", "eot", "eom")}
        told = {
            i
            for text in _END_TEXTS
            if (i := self.ids.get(text)) is not None and self.types[i] == _CONTROL
        }
        return frozenset(told | {i for i in named if i is not None})

    def post_processor(self) -> processors.TemplateProcessing:
        """Adds the tokens that begin and end a text, as the file or its kind wants."""
        bos, eos = self.token_id("bos"), self.token_id("eos")
        default = self.is_sentencepiece or self.pre in _WHOLE_WORDS
        return surround(
            bos if self.get("add_bos_token", default) else None,
            eos if self.get("add_eos_token", False) else None,
        )


def surround(bos: int | None, eos: int | None) -> processors.TemplateProcessing:
    """What a tokenizer adds around a text: these tokens, where there are some."""
    added = {name: i for name, i in (("bos", bos), ("eos", eos)) if i is not None}
    return processors.TemplateProcessing(
        single=["bos"] * ("bos" in added) + ["$A"] + ["eos"] * ("eos" in added),
        special_tokens=list(added.items()),
    )


def _byte_level(vocab: _Vocab) -> Tokenizer:
    """`gpt2`: byte-level BPE with its merges, the text cut by the patterns of `pre`."""
    patterns = _PATTERNS.get(vocab.pre)
    if patterns is None:
        logger.warning(
            "the GGUF file's pre-tokenizer %r is unknown: text is cut in llama.cpp's default way, "
            "and prompts may get other tokens than the model was trained on",
            vocab.pre,
        )
        patterns = _DEFAULT
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab.ids,
            merges=[_pair(merge) for merge in vocab.get("merges", [])],
            ignore_merges=vocab.pre in _WHOLE_WORDS,
        )
    )
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(vocab: _Vocab) -> Tokenizer:
    """`llama`: SentencePiece BPE, whose merges follow from the scores of the pieces."""
    unknown = vocab.token_id("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab.ids,
            merges=_merges_by_score(vocab),
            unk_token=None if unknown is None else vocab.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = vocab.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    )
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocab: _Vocab) -> list[tuple[str, str]]:
    """Every way to make a piece of two others; the piece with the highest score first."""
    ids, types = vocab.ids, vocab.types
    scores: list[float] = vocab.get("scores") or [-float(i) for i in range(len(types))]
    mergeable = (_NORMAL, _USER_DEFINED, _UNUSED)
    pieces = {piece: i for piece, i in ids.items() if types[i] in mergeable}
    ordered = sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in ordered
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
