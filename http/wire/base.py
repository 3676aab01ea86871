"""How a JSON object becomes a declared type, and how a failure becomes one sentence.

Knows no field of any API. Types are strict: a bool is no integer, "5" is no number. A null stands
for the default, unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from treadle.engine.errors import InvalidRequest, NotBuilt
from treadle.engine.show import show

T = TypeVar("T")
W = TypeVar("W", bound="Wire")
Path = tuple[str | int, ...]

MAX_KEY = 1024  # characters
MAX_RID = 256  # characters; an id stands in every chunk of a stream

_LEGAL = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """What to continue: texts or token ids, one or many."""

    texts: list[str] | None  # None: the client sent ids
    ids: list[list[int]]
    is_batch: bool  # whether the client sent a list of prompts, be it of one

    def __len__(self) -> int:
        return len(self.ids if self.texts is None else self.texts)


class Wire(BaseModel):
    """Base of every declared JSON object."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}

    @classmethod
    def parse(cls: type[W], data: object, at: Path = ()) -> W:
        """at: where in the body the data stands.

        Raises: InvalidRequest that names the field's path and what is legal there.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _explain(error.errors(include_url=False), data, at) from None


def illegal(legal: str) -> PydanticCustomError:
    """Raised by a validator: the value is not `legal`, a phrase such as `a list of strings`."""
    return PydanticCustomError("illegal", "{legal}", {"legal": legal})


def between(low: float, high: float) -> AfterValidator:
    """A number from low to high."""

    def check(value: float) -> float:
        if not low <= value <= high:
            raise illegal(f"from {low} to {high}")
        return value

    return AfterValidator(check)


def _refuse(value: T, info: ValidationInfo) -> T:
    if not _is_neutral(value):
        raise NotBuilt(info.field_name or "this field")
    return value


def _is_neutral(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_neutral, value))
    return value is None or value is False or value == ""


Unbuilt = Annotated[T | None, AfterValidator(_refuse)]
"""A field of this type is known, but anything except null, false, "" or [] is refused."""


def _only_rank_0(value: int | None) -> int | None:
    if value not in (None, 0):
        raise illegal("0, the only data-parallel rank here")
    return value


DpRank = Annotated[int | None, AfterValidator(_only_rank_0)]


class _FailFast(FailFast):
    __hash__ = object.__hash__  # so that the annotation may stand in a union


FastList = Annotated[list[T], _FailFast()]
"""A list whose check stops at the first bad element."""


def _read_strs(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and _are(value, str):
        return tuple(value)
    raise illegal("a string or a list of strings")


def _read_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and _are(value, int):
        return tuple(value)
    raise illegal("a list of token ids")


def _read_texts(value: object) -> Prompts:
    if isinstance(value, str):
        return Prompts([value], [], is_batch=False)
    if isinstance(value, list) and value and _are(value, str):
        return Prompts(value, [], is_batch=True)
    raise illegal("a string or a non-empty list of strings")


def _read_token_ids(value: object) -> Prompts:
    if isinstance(value, list):
        if _are(value, int):
            return Prompts(None, [value], is_batch=False)
        if _are(value, list) and all(_are(ids, int) for ids in value):
            return Prompts(None, value, is_batch=True)
    raise illegal("a list of token ids or a list of such lists")


def _read_prompts(value: object) -> Prompts:
    for read in (_read_texts, _read_token_ids):
        try:
            return read(value)
        except PydanticCustomError:
            continue
    raise illegal(
        "a string, a non-empty list of strings, a list of token ids or a list of such lists"
    )


def _read_key(value: str) -> str:
    if len(value) > MAX_KEY:
        raise illegal(f"at most {MAX_KEY} characters long")
    return value


def _read_rid(value: str) -> str:
    if not 0 < len(value) <= MAX_RID:
        raise illegal(f"1 to {MAX_RID} characters long")
    return value


def _are(values: Sequence[object], kind: type) -> bool:
    """Exact types: True is no int. A set of types is the fastest way over 10**6 token ids."""
    return not set(map(type, values)) - {kind}


Strs = Annotated[tuple[str, ...], PlainValidator(_read_strs)]
Ids = Annotated[tuple[int, ...], PlainValidator(_read_ids)]
Key = Annotated[str, AfterValidator(_read_key)]
Rid = Annotated[str, AfterValidator(_read_rid)]
Texts = Annotated[Prompts, PlainValidator(_read_texts)]
TokenIds = Annotated[Prompts, PlainValidator(_read_token_ids)]
AnyPrompts = Annotated[Prompts, PlainValidator(_read_prompts)]


def _explain(errors: Sequence[ErrorDetails], data: object, at: Path) -> InvalidRequest:
    """One sentence about the first bad field; of a union's members the deepest match speaks."""
    located = [(_path(error, data), error) for error in errors]
    field = located[0][0][:1]
    deepest = max((path for path, _ in located if path[:1] == field), key=len)
    chosen = [error for path, error in located if path == deepest]
    where = spell((*at, *deepest))
    if chosen[0]["type"] == "missing":
        return InvalidRequest(f"{where} is required", where)
    legal = " or ".join(dict.fromkeys(map(_legal, chosen)))
    return InvalidRequest(f"{where} must be {legal}, got {show(chosen[0]['input'])}", where)


def _legal(error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "literal_error":
        return f"one of {error['ctx']['expected']}"
    if kind == "greater_than_equal":
        return f"at least {error['ctx']['ge']}"
    if kind == "too_long":
        return f"at most {error['ctx']['max_length']} entries"
    return _LEGAL.get(kind) or error["msg"]


def _path(error: ErrorDetails, data: object) -> Path:
    """The location in the client's own terms: pydantic's names of union members drop out."""
    path: list[str | int] = []
    for key in error["loc"]:
        if isinstance(data, dict) and key in data:
            data = data[key]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif not (error["type"] == "missing" and key == error["loc"][-1]):
            continue
        path.append(key)
    return tuple(path)


def spell(path: Iterable[str | int]) -> str:
    """`messages[0].role`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
