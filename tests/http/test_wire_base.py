"""How a failed check becomes one sentence."""

from __future__ import annotations

from typing import Literal

import pytest

from treadle.engine.errors import InvalidRequest, NotBuilt
from treadle.http.wire.base import FastList, Unbuilt, Wire, spell


class Inner(Wire):
    kind: Literal["a", "b"]
    size: int = 0


class Outer(Wire):
    either: str | FastList[Inner] | None = None
    inner: Inner | None = None
    numbers: FastList[int] = []
    later: Unbuilt[str | FastList[bool]] = None


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"either": 5}, "either must be a string or a list, got 5"),
        ({"either": [{}]}, "either[0].kind is required"),
        ({"either": [{"kind": "c"}]}, "either[0].kind must be one of 'a' or 'b', got 'c'"),
        ({"inner": {"kind": "a", "size": 1.5}}, "inner.size must be an integer, got 1.5"),
        ({"inner": []}, "inner must be an object, got []"),
        ({"numbers": [1, True, "x"]}, "numbers[1] must be an integer, got True"),
        ({"later": 5}, "later must be a string or a list, got 5"),
    ],
)
def test_sentence_names_path_and_legal_values(data: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        Outer.parse(data)
    assert error.value.message == sentence
    assert sentence.startswith(error.value.param or "?")


@pytest.mark.parametrize("value", [None, "", [], [False, False]])
def test_neutral_value_of_an_unbuilt_field_passes(value: object) -> None:
    Outer.parse({"later": value})


@pytest.mark.parametrize("value", ["x", [False, True]])
def test_other_value_of_an_unbuilt_field_is_refused(value: object) -> None:
    with pytest.raises(NotBuilt) as error:
        Outer.parse({"later": value})
    assert error.value.param == "later"


def test_list_check_stops_at_the_first_bad_element() -> None:
    with pytest.raises(InvalidRequest, match=r"numbers\[0\] must be an integer"):
        Outer.parse({"numbers": ["x"] * 1_000_000})


def test_path_is_spelled_as_the_client_wrote_it() -> None:
    assert spell(("messages", 0, "content", 2, "type")) == "messages[0].content[2].type"
