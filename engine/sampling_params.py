"""How a request wants its tokens chosen and when it wants to stop, with every legal range.

Names, defaults and ranges are SGLang's. Fields that are declared but not built yet are checked
for range and then refused unless neutral, so that nothing is silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from treadle.engine.errors import InvalidRequest, NotBuilt
from treadle.engine.show import show

MAX_STOPS = 32  # SGLang's limit for `stop` and `stop_regex`
MAX_N = 128  # OpenAI's limit for `n`
MAX_STOP_TOKEN_IDS = 1024
INT64 = 2**63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Immutable; `validate` tells whether every value is legal."""

    max_new_tokens: int | None = 128  # None: the rest of the context
    min_new_tokens: int = 0  # before that many, no end token and none of stop_token_ids is drawn
    temperature: float = 1.0  # below 1e-6: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False  # also ignores stop_token_ids; stop strings still hold
    n: int = 1
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False  # keep the matched stop string or token in the text
    stream_interval: int | None = None  # tokens per delta; None: the server's
    beam_width: int | None = None
    logit_bias: Mapping[str, float] | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: Mapping[str, Any] | None = field(default=None, hash=False)
    watermark: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """One stop may be given alone, and several in a list."""
        for name in ("stop", "stop_regex", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, (value,))
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(value))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], where: str = "sampling_params"
    ) -> SamplingParams:
        """Reads SGLang's dictionary form. None means the default; a single `stop` may be a string.

        Raises: InvalidRequest for an unknown key or a wrong type, naming `where.key`.
        """
        known = {f.name: f for f in fields(cls)}
        given: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise InvalidRequest(
                    f"{where}.{key} is not a sampling parameter; known: {', '.join(known)}",
                    f"{where}.{key}",
                )
            if value is not None or key == "max_new_tokens":
                given[key] = _READERS[key](value, f"{where}.{key}")
        return cls(**given)

    def validate(self, vocab_size: int, names: Callable[[str], str] = lambda name: name) -> None:
        """Checks every range, then that no value asks for what is not built.

        vocab_size: rows of the model's embedding.
        names: maps a field of this class to the caller's own name for it.
        Raises: InvalidRequest, NotBuilt.
        """
        self.check_types(names)
        for name, (ok, legal) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not ok(value):
                raise InvalidRequest(
                    f"{names(name)} must be {legal}, got {show(value)}", names(name)
                )
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequest(
                f"{names('min_new_tokens')} must be at most {names('max_new_tokens')} "
                f"({self.max_new_tokens}), got {self.min_new_tokens}",
                names("min_new_tokens"),
            )
        for name in ("stop_token_ids", "logit_bias"):
            self._check_ids(name, vocab_size, names(name))
        for name, is_neutral in _NOT_BUILT.items():
            if not is_neutral(getattr(self, name)):
                raise NotBuilt(names(name))

    def check_types(self, names: Callable[[str], str] = lambda name: name) -> None:
        """Raises: InvalidRequest for a value of a type that its field never has."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or (each.default is not None and each.name != "max_new_tokens"):
                _READERS[each.name](value, names(each.name))

    def _check_ids(self, name: str, vocab_size: int, shown: str) -> None:
        for token_id in getattr(self, name) or ():
            try:
                in_range = 0 <= int(token_id) < vocab_size
            except ValueError:
                in_range = False
            if not in_range:
                raise InvalidRequest(
                    f"{shown} must hold token ids from 0 to {vocab_size - 1}, got {show(token_id)}",
                    shown,
                )


def _between(low: float, high: float) -> Callable[[float], bool]:
    return lambda value: math.isfinite(value) and low <= value <= high


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: 0 <= v < INT64, f"from 0 to {INT64 - 1}"),
    "min_new_tokens": (lambda v: 0 <= v < INT64, f"from 0 to {INT64 - 1}"),
    "temperature": (_between(0.0, 1e4), "a finite number from 0 to 10000"),
    "top_p": (lambda v: math.isfinite(v) and 0.0 < v <= 1.0, "above 0 and at most 1"),
    "top_k": (lambda v: v == -1 or 1 <= v < INT64, "-1 (all) or at least 1"),
    "min_p": (_between(0.0, 1.0), "from 0 to 1"),
    "frequency_penalty": (_between(-2.0, 2.0), "from -2 to 2"),
    "presence_penalty": (_between(-2.0, 2.0), "from -2 to 2"),
    "repetition_penalty": (
        lambda v: math.isfinite(v) and 0.0 < v <= 2.0,
        "above 0 and at most 2",
    ),
    "stop": (
        lambda v: len(v) <= MAX_STOPS and all(0 < len(s) <= 4096 for s in v),
        f"at most {MAX_STOPS} strings of 1 to 4096 characters",
    ),
    "stop_token_ids": (
        lambda v: len(v) <= MAX_STOP_TOKEN_IDS,
        f"at most {MAX_STOP_TOKEN_IDS} token ids",
    ),
    "stop_regex": (
        lambda v: len(v) <= MAX_STOPS and all(len(s.encode()) <= 256 for s in v),
        f"at most {MAX_STOPS} patterns of at most 256 bytes",
    ),
    "n": (lambda v: 1 <= v <= MAX_N, f"from 1 to {MAX_N}"),
    "sampling_seed": (lambda v: -INT64 <= v < INT64, "a signed 64-bit integer"),
    "stream_interval": (lambda v: 1 <= v < INT64, "at least 1"),
    "beam_width": (lambda v: 1 <= v <= MAX_N, f"from 1 to {MAX_N}"),
    "logit_bias": (
        lambda v: len(v) <= 1024 and all(math.isfinite(b) and -100 <= b <= 100 for b in v.values()),
        "at most 1024 entries with biases from -100 to 100",
    ),
}

# Declared and range-checked, refused unless neutral.
_NOT_BUILT: dict[str, Callable[[Any], bool]] = {
    "top_p": lambda v: v == 1.0,
    "top_k": lambda v: v == -1,
    "min_p": lambda v: v == 0.0,
    "frequency_penalty": lambda v: v == 0.0,
    "presence_penalty": lambda v: v == 0.0,
    "repetition_penalty": lambda v: v == 1.0,
    "stop_regex": lambda v: not v,
    "beam_width": lambda v: v in (None, 1),
    "logit_bias": lambda v: not v or all(bias == 0 for bias in v.values()),
    "regex": lambda v: v is None,
    "json_schema": lambda v: v is None,
    "ebnf": lambda v: v is None,
    "structural_tag": lambda v: v is None,
    "custom_params": lambda v: not v,
    "watermark": lambda v: not v,
}


def _wrong(where: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"{where} must be {expected}, got {show(value)}", where)


def _read_int(value: Any, where: str) -> int | None:
    if value is None and where.endswith("max_new_tokens"):
        return None  # the rest of the context
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(where, "an integer", value)
    return value


def _read_number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(where, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong(where, "a finite number", value) from None


def _read_bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "true or false", value)
    return value


def _read_str(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a string", value)
    return value


def _read_strs(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) for s in value):
        raise _wrong(where, "a string or a list of strings", value)
    return tuple(value)


def _read_ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or any(
        isinstance(i, bool) or not isinstance(i, int) for i in value
    ):
        raise _wrong(where, "a list of token ids", value)
    return tuple(value)


def _read_bias(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object of token id to bias", value)
    return {str(key): _read_number(bias, f"{where}.{key}") for key, bias in value.items()}


def _read_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    return dict(value)


_READERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(
        ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed", "stream_interval",
         "beam_width"),
        _read_int,
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty",
         "repetition_penalty"),
        _read_number,
    ),
    **dict.fromkeys(
        ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
        _read_bool,
    ),
    **dict.fromkeys(("regex", "json_schema", "ebnf", "structural_tag"), _read_str),
    **dict.fromkeys(("custom_params", "watermark"), _read_object),
    "stop": _read_strs,
    "stop_regex": _read_strs,
    "stop_token_ids": _read_ids,
    "logit_bias": _read_bias,
}  # fmt: skip
