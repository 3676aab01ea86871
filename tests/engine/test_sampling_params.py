from __future__ import annotations

import math
from dataclasses import fields

import pytest

from treadle.engine import InvalidRequest, NotBuilt, SamplingParams

VOCAB = 1000
NAN, INF = math.nan, math.inf


def check(**values: object) -> None:
    SamplingParams(**values).validate(VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0},
        {"temperature": -0.0},
        {"temperature": 1e4},
        {"max_new_tokens": None},
        {"max_new_tokens": 10**18},
        {"stop": ("a",) * 32},
        {"stop_token_ids": (0, VOCAB - 1)},
        {"n": 128},
        {"sampling_seed": -(2**63)},
        {"sampling_seed": 2**63 - 1},
        {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {"5": 0.0}},
        {"beam_width": 1},
    ],
)
def test_legal_values_pass(values: dict[str, object]) -> None:
    check(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (-1.0, 1e9, NAN, INF, -INF)],
        *[("top_p", v) for v in (0.0, -0.1, 1.1, NAN, INF)],
        *[("top_k", v) for v in (0, -2, 2**63)],
        *[("min_p", v) for v in (-0.1, 1.5, NAN)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, INF)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, -INF)],
        *[("repetition_penalty", v) for v in (0.0, -1.0, 2.1, NAN, INF)],
        *[("max_new_tokens", v) for v in (-1, 2**63)],
        ("min_new_tokens", -1),
        *[("n", v) for v in (0, -1, 129, 10**9)],
        *[("sampling_seed", v) for v in (2**63, -(2**63) - 1)],
        *[("stop", v) for v in (("",), ("a",) * 33, ("a" * 5000,))],
        *[("stop_token_ids", v) for v in ((VOCAB,), (-1,), tuple(range(1000)) * 2)],
        ("stop_regex", ("a" * 257,)),
        ("stream_interval", 0),
        ("beam_width", 0),
        *[("logit_bias", v) for v in ({"1000": 1.0}, {"-1": 1.0}, {"x": 1.0}, {"1": 101.0},
                                      {"1": NAN})],
    ],
)  # fmt: skip
def test_illegal_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(**{name: value})
    assert caught.value.param == name and name in caught.value.message
    assert not isinstance(caught.value, NotBuilt)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9), ("top_k", 40), ("min_p", 0.1), ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5), ("repetition_penalty", 1.1),
        ("stop_regex", ("a+",)), ("logit_bias", {"5": 1.0}), ("regex", "a"), ("ebnf", "root"),
        ("json_schema", "{}"), ("structural_tag", "{}"), ("beam_width", 2),
        ("custom_params", {"a": 1}), ("watermark", {"a": 1}),
    ],
)  # fmt: skip
def test_legal_value_that_is_not_built_says_so(name: str, value: object) -> None:
    with pytest.raises(NotBuilt, match=f"{name} is not supported yet"):
        check(**{name: value})


def test_min_above_max_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most max_new_tokens"):
        check(min_new_tokens=9, max_new_tokens=3)


def test_errors_use_the_callers_names() -> None:
    with pytest.raises(InvalidRequest, match="^max_tokens must be"):
        SamplingParams(max_new_tokens=-1).validate(
            VOCAB, lambda name: "max_tokens" if name == "max_new_tokens" else name
        )


def test_mapping_reads_every_field_and_takes_none_as_default() -> None:
    empty = SamplingParams.from_mapping({f.name: None for f in fields(SamplingParams)})
    assert empty == SamplingParams(max_new_tokens=None)
    given = SamplingParams.from_mapping({"stop": "x", "temperature": 1, "stop_token_ids": [3]})
    assert given.stop == ("x",) and given.stop_token_ids == (3,)
    assert type(given.temperature) is float


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "1"), ("temperature", True), ("temperature", 10**400), ("top_k", 1.5),
        ("max_new_tokens", "5"), ("max_new_tokens", True), ("stop", 5), ("stop", ["a", 1]),
        ("stop_token_ids", [1.5]), ("stop_token_ids", [True]), ("stop_token_ids", 5),
        ("ignore_eos", 1), ("regex", {}), ("logit_bias", []), ("logit_bias", {"1": "x"}),
        ("custom_params", "x"), ("bootstrap_host", "2.2.2.2"), ("max_tokens", 5),
    ],
)  # fmt: skip
def test_mapping_refuses_wrong_types_and_unknown_keys(key: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({key: value})
    assert caught.value.param is not None
    assert caught.value.param.startswith(f"sampling_params.{key}")
