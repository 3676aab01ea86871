"""How a setting is declared and checked: its default, its help, what is legal, its other names.

Knows no setting by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from typing import Any

from treadle.engine.errors import ConfigError

_KINDS: dict[str, Any] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "Mapping": Mapping,
    "Sequence": (list, tuple),
}
_NOUNS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text",
          "Mapping": "a JSON object", "Sequence": "a list of integers"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Legal:
    """What a setting, or each number of a list, may be. `also` is legal beside the range."""

    choices: tuple[str, ...] = ()
    at_least: int | None = None
    above: float | None = None
    below: float | None = None
    also: int | None = None

    def __contains__(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.also is not None and value == self.also:
            return True
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = [
            f"{word} {bound}"
            for word, bound in (
                ("of at least", self.at_least),
                ("above", self.above),
                ("below", self.below),
            )
            if bound is not None
        ]
        return " and ".join(bounds) + ("" if self.also is None else f", or {self.also}")


ANYTHING = Legal()
AT_LEAST_ONE = Legal(at_least=1)


def setting(
    default: Any, doc: str, legal: Legal = ANYTHING, *, aliases: tuple[str, ...] = ()
) -> Any:
    """A flag: its default, its help text, what it may be and its other names."""
    return field(default=default, metadata={"help": doc, "legal": legal, "aliases": aliases})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def names_of(each: Field[Any]) -> tuple[str, ...]:
    """A setting's own name, then its aliases."""
    aliases: tuple[str, ...] = each.metadata["aliases"]
    return (each.name, *aliases)


def kind_of(each: Field[Any]) -> str:
    """What a setting holds when it is not None.

    `int`, `float`, `bool`, `str`, `Mapping`, or `Sequence` for a list of integers.
    """
    return str(each.type).removesuffix(" | None").split("[")[0]


def check_setting(each: Field[Any], value: Any) -> None:
    """Raises: ConfigError."""
    if value is not None or each.default is not None:
        check_value(flag(each.name), kind_of(each), each.metadata["legal"], value)


def check_value(label: str, kind: str, legal: Legal, value: Any) -> None:
    """Raises: ConfigError that says what `label` may be."""
    if not _is_kind(kind, value) or not _is_legal(kind, legal, value):
        words = ("" if legal.choices else _NOUNS[kind], str(legal))
        raise ConfigError(f"{label} must be {' '.join(filter(None, words))}, got {value!r}")


def _is_kind(kind: str, value: Any) -> bool:
    if not isinstance(value, _KINDS[kind]) or (kind != "bool" and isinstance(value, bool)):
        return False
    if kind == "Sequence":
        return bool(value) and all(_is_kind("int", number) for number in value)
    return kind != "float" or math.isfinite(value)


def _is_legal(kind: str, legal: Legal, value: Any) -> bool:
    return all(v in legal for v in value) if kind == "Sequence" else value in legal
