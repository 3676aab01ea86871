from __future__ import annotations

from typing import Any

import pytest

from treadle.engine import ConfigError
from treadle.engine.config import EngineConfig, ModelFacts, Resolved, context_length, resolve


def facts(**changed: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "max_position": 1000, "bytes_per_token": 100, "free_bytes": 10**9, "is_host": True,
    }  # fmt: skip
    return ModelFacts(**{**values, **changed})


def resolved(facts_: ModelFacts | None = None, **flags: Any) -> Resolved:
    return resolve(EngineConfig.from_flags(flags), facts_ or facts())


def test_automatic_pool_is_sixteen_contexts_when_they_fit() -> None:
    found = resolved()
    assert found.max_total_tokens == 16_000 and found.reasons["max_total_tokens"] == (
        "16 full contexts"
    )
    assert (found.page_size, found.chunked_prefill_size) == (1, 512)


def test_automatic_pool_is_half_the_free_memory_when_less() -> None:
    found = resolved(facts(free_bytes=1_000_000))
    assert found.max_total_tokens == 5000
    assert found.reasons["max_total_tokens"] == "half of the free memory"


@pytest.mark.parametrize(("given", "page", "found"), [(100, 16, 112), (96, 16, 96), (5, 64, 64)])
def test_given_pool_is_rounded_up_to_pages(given: int, page: int, found: int) -> None:
    assert resolved(max_total_tokens=given, page_size=page).max_total_tokens == found


def test_pool_never_exceeds_what_fits() -> None:
    found = resolved(facts(free_bytes=1_000_000), max_total_tokens=10**6, page_size=64)
    assert found.max_total_tokens == 4992


def test_pool_without_room_names_the_numbers() -> None:
    with pytest.raises(ConfigError, match="bytes a token"):
        resolved(facts(free_bytes=100))


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="--context-length 1001 .* 1000 positions"):
        context_length(EngineConfig.from_flags({"context_length": 1001}), 1000)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"page_size": 0}, "--page-size must be"),
        ({"page_size": True}, "--page-size must be"),
        ({"max_running_requests": -3}, "--max-running-requests must be"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size must be -1 or"),
        ({"dtype": "float8"}, "--dtype must be one of auto"),
        ({"load_format": "x"}, "--load-format must be one of"),
        ({"max_total_token": 5}, "did you mean max_total_tokens"),
        ({"zzz": 5}, "zzz is not a setting"),
    ],
)
def test_illegal_settings_are_refused_by_flag(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_flags(flags)


def test_every_automatic_value_has_a_reason() -> None:
    found = resolved(page_size=4)
    assert found.reasons["page_size"] == "given"
    assert set(found.reasons) == set(Resolved.__dataclass_fields__) - {"reasons"}
