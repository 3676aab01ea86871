"""Values in messages are short, whatever a caller sends."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.engine.errors import InvalidRequest
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.show import MAX_SHOWN, show

HUGE: list[Any] = [
    "x" * 10**6, [["y" * 10**5] * 50] * 50, {"k" * 10**5: 1}, ("z" * 500,) * 500, 10**4000,
    [1] * 10**6,
]  # fmt: skip


@pytest.mark.parametrize("value", [5, "text", None, True, 1.5, [1, "a"], {"a": 1}, float("nan")])
def test_small_value_is_shown_whole(value: object) -> None:
    assert show(value) == repr(value)


@pytest.mark.parametrize("value", HUGE, ids=lambda value: type(value).__name__)
def test_huge_value_is_cut(value: object) -> None:
    assert len(show(value)) <= MAX_SHOWN


@pytest.mark.parametrize("value", HUGE, ids=lambda value: type(value).__name__)
def test_message_about_a_sampling_parameter_stays_short(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling_params\.regex must be a string") as caught:
        SamplingParams.from_mapping({"regex": value if not isinstance(value, str) else [value]})
    assert len(caught.value.message) < MAX_SHOWN + 100
