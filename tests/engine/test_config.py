from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from treadle.engine import ConfigError
from treadle.engine.config import EngineConfig, kind_of


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"page_size": 0}, "--page-size must be an integer of at least 1, got 0"),
        ({"page_size": True}, "--page-size must be"),
        ({"page_size": 16.0}, "--page-size must be"),
        ({"max_running_requests": -3}, "--max-running-requests must be"),
        ({"max_queued_requests": 0}, "--max-queued-requests must be"),
        ({"max_prefill_tokens": None}, "--max-prefill-tokens must be"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size must be .* at least 1, or -1"),
        ({"mem_fraction_static": 0}, "--mem-fraction-static must be .* above 0 and below 1"),
        ({"mem_fraction_static": 1.0}, "--mem-fraction-static must be"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static must be"),
        ({"schedule_conservativeness": 0.0}, "--schedule-conservativeness must be"),
        ({"schedule_conservativeness": float("inf")}, "--schedule-conservativeness must be"),
        ({"schedule_conservativeness": "1"}, "--schedule-conservativeness must be a number"),
        ({"priority_scheduling_preemption_threshold": -1}, "threshold must be .* at least 0"),
        ({"default_priority_value": "high"}, "--default-priority-value must be an integer"),
        ({"enable_priority_scheduling": 1}, "--enable-priority-scheduling must be true or false"),
        ({"schedule_policy": "hrrn"}, "--schedule-policy must be one of fcfs, lpm, dfs-weight, "),
        ({"retraction_policy": "age"}, "--retraction-policy must be one of length, priority"),
        ({"admission": "best"}, "--admission must be one of observed, sglang"),
        ({"radix_eviction_policy": "arc"}, "--radix-eviction-policy must be one of lru, lfu, "),
        ({"radix_eviction_policy_config": "{}"}, "policy-config must be a JSON object"),
        ({"radix_eviction_policy_config": {"x": 1}}, "--radix-eviction-policy-config.*x"),
        ({"dtype": "float8"}, "--dtype must be one of auto"),
        ({"load_format": "x"}, "--load-format must be one of"),
        ({"max_total_token": 5}, "did you mean max_total_tokens"),
        ({"zzz": 5}, "zzz is not a setting"),
    ],
)
def test_illegal_settings_are_refused_by_flag(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_flags(flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"chunked_prefill_size": -1},
        {"mem_fraction_static": 0.5, "schedule_conservativeness": 2},
        {"default_priority_value": -7, "enable_priority_scheduling": True},
        {
            "radix_eviction_policy": "slru",
            "radix_eviction_policy_config": {"protected_threshold": 3},
        },
        {"max_queued_requests": None, "admission": "sglang"},
    ],
)
def test_legal_settings_are_kept(flags: dict[str, Any]) -> None:
    values = EngineConfig.from_flags(flags).values()
    assert {name: values[name] for name in flags} == flags


def test_defaults_are_sglangs() -> None:
    values = EngineConfig().values()
    expected = {
        "max_prefill_tokens": 16384, "schedule_policy": "fcfs", "schedule_conservativeness": 1.0,
        "retraction_policy": "length", "priority_scheduling_preemption_threshold": 10,
        "radix_eviction_policy": "lru", "num_continuous_decode_steps": 1,
        "clip_max_new_tokens_estimation": 4096, "max_queued_requests": None,
        "mem_fraction_static": None, "enable_mixed_chunk": False, "stream_interval": 1,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    EngineConfig().check()


def test_replace_changes_what_it_names_and_keeps_the_rest() -> None:
    given = EngineConfig.from_flags({"page_size": 16, "schedule_policy": "lof"})
    changed = given.replace({"page_size": None, "max_total_tokens": 99})
    assert changed.values() == given.values() | {"page_size": None, "max_total_tokens": 99}
    assert given.memory.page_size == 16


def test_no_name_is_declared_twice_and_every_kind_is_known() -> None:
    groups = [getattr(EngineConfig(), each.name) for each in fields(EngineConfig)]
    names = [each.name for group in groups for each in fields(group)]
    assert len(names) == len(set(names)) == len(EngineConfig().values())
    kinds = {kind_of(each) for group in groups for each in fields(group)}
    assert kinds == {"int", "float", "bool", "str", "Mapping"}
