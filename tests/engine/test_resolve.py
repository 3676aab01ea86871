from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.engine import ConfigError
from treadle.engine.config import EngineConfig, flag
from treadle.engine.memory import GB, ModelFacts
from treadle.engine.resolve import Infeasible, Resolved, context_length, resolve


def facts(**changed: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "max_position": 1000, "bytes_per_token": 100, "weight_bytes": 10**8, "free_bytes": 10**9,
        "capacity_bytes": 2 * 10**9, "step_bytes_per_token": 10, "step_bytes_per_row": 100,
        "is_host": True,
    }  # fmt: skip
    return ModelFacts(**{**values, **changed})


def gpu(gigabytes: int = 80, **changed: Any) -> ModelFacts:
    """A GPU with a model of 8 billion parameters in bf16."""
    values: dict[str, Any] = {
        "max_position": 131072, "bytes_per_token": 131072, "weight_bytes": 15 * GB,
        "free_bytes": (gigabytes - 15) * GB, "capacity_bytes": gigabytes * GB,
        "step_bytes_per_token": 150_000, "step_bytes_per_row": 128256 * 14, "is_host": False,
    }  # fmt: skip
    return facts(**{**values, **changed})


def resolved(facts_: ModelFacts | None = None, **flags: Any) -> Resolved:
    return resolve(EngineConfig.from_flags(flags), facts_ or facts())


def test_automatic_pool_of_a_host_is_sixteen_contexts_when_they_fit() -> None:
    found = resolved()
    assert found.max_total_tokens == 16_000
    assert found.reasons["max_total_tokens"] == "16 full contexts"
    assert (found.page_size, found.chunked_prefill_size) == (1, 512)


def test_automatic_pool_of_a_host_is_half_the_free_memory_when_less() -> None:
    found = resolved(facts(free_bytes=10_000_000, weight_bytes=0, bytes_per_token=1000))
    assert found.max_total_tokens == 5000
    assert found.reasons["max_total_tokens"] == "half of the free memory"


def test_given_fraction_sizes_a_hosts_pool() -> None:
    found = resolved(mem_fraction_static=0.7, page_size=16)
    assert found.max_total_tokens == (int(0.7 * 1.1e9) - 10**8) // 1600 * 16 - 16
    assert found.mem_fraction_static == 0.7


def test_given_tokens_go_beyond_a_hosts_default_pool() -> None:
    found = resolved(max_total_tokens=6_000_000)
    assert found.max_total_tokens == 6_000_000 and found.equation.reserve > 0


@pytest.mark.parametrize(("given", "page", "found"), [(100, 16, 112), (96, 16, 96), (5, 64, 64)])
def test_given_pool_is_rounded_up_to_pages(given: int, page: int, found: int) -> None:
    assert resolved(max_total_tokens=given, page_size=page).max_total_tokens == found


def test_pool_never_exceeds_what_fits_and_says_so() -> None:
    found = resolved(max_total_tokens=10**9, page_size=64)
    assert found.max_total_tokens * 100 < 10**9 and found.max_total_tokens % 64 == 0
    assert found.equation.reserve >= 0
    assert any("--max-total-tokens 1000000000 does not fit" in text for text in found.warnings)


def test_pool_below_one_context_is_warned_of() -> None:
    assert any("less than one context" in text for text in resolved(max_total_tokens=999).warnings)
    assert resolved(max_total_tokens=1000).warnings == ()


def test_automatic_gpu_gets_all_that_fits_and_sglangs_figures() -> None:
    found = resolved(gpu())
    assert found.chunked_prefill_size == 8192
    # 0.5 + 12 + 0.125 + 0.5 + 58 x 8 / 1024 GB set aside
    assert found.mem_fraction_static == round(1 - 13.578 / 80, 3)
    pool = found.max_total_tokens
    assert abs(pool - (found.mem_fraction_static * 80 - 15) * 8192) <= 2
    assert found.max_running_requests == 2048
    assert found.equation.reserve > 5 * GB


@pytest.mark.parametrize(("chunk", "step"), [(-1, 131072), (300, 300), (None, 8192)])
def test_activations_are_those_of_the_largest_step(chunk: int | None, step: int) -> None:
    found = resolved(gpu(141), chunked_prefill_size=chunk, max_running_requests=10)
    assert found.equation.step_tokens == step
    assert found.equation.activations == step * 150_000 + 10 * 128256 * 14


def test_whole_prompts_set_aside_what_sglang_does_for_its_token_limit() -> None:
    found = resolved(gpu(141, max_position=8192), chunked_prefill_size=-1)
    # 0.5 + 24 + 0.125 + 0.5 + 74 x 8 / 1024 GB
    assert found.mem_fraction_static == round(1 - 25.703 / 141, 3)


def test_many_rows_are_not_promised_beside_a_large_vocabulary() -> None:
    found = resolved(gpu(24, max_position=8192, step_bytes_per_row=256_000 * 14))
    assert 1 <= found.max_running_requests < 2048
    assert found.reasons["max_running_requests"] == "logits and tables of more would not fit"
    assert found.equation.reserve >= 0


@pytest.mark.parametrize(
    ("pool", "context", "running"),
    [
        (100_000, 1000, 4096),
        (5000, 1000, 2500),
        (4500, 2000, 2048),
        (3000, 1000, 1500),
        (2, 1000, 1),
    ],
)
def test_automatic_running_follows_pool_and_context(pool: int, context: int, running: int) -> None:
    of = gpu(max_position=context)
    assert resolved(of, max_total_tokens=pool).max_running_requests == running


def test_given_running_is_lowered_to_half_the_pool() -> None:
    found = resolved(max_total_tokens=100, max_running_requests=70, context_length=50)
    assert found.max_running_requests == 50
    assert found.warnings == (
        "--max-running-requests 70 is lowered to 50: half of the pool's tokens",
    )


def test_cache_aware_policy_without_a_cache_is_fcfs() -> None:
    found = resolved(schedule_policy="lpm", disable_radix_cache=True)
    assert found.config.schedule.schedule_policy == "fcfs"
    assert found.reasons["schedule_policy"] == "lpm needs the prefix cache" and found.warnings
    assert resolved(schedule_policy="lpm").config.schedule.schedule_policy == "lpm"


def test_resolved_config_holds_the_automatic_values() -> None:
    found = resolved(gpu(), page_size=16)
    assert found.config.memory.max_total_tokens == found.max_total_tokens
    assert found.config.memory.mem_fraction_static == found.mem_fraction_static
    assert found.config.schedule.chunked_prefill_size == 8192
    assert found.config.schedule.max_running_requests == found.max_running_requests
    assert found.config.model.context_length == 131072
    assert found.reasons["page_size"] == "given"
    again = resolve(found.config, gpu())
    assert again.config == found.config and set(again.reasons.values()) == {"given"}


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="--context-length 1001 .* 1000 positions"):
        context_length(EngineConfig.from_flags({"context_length": 1001}), 1000)


def check_advice(config: EngineConfig, of: ModelFacts, error: Infeasible) -> None:
    """Every alternative is in the message and, applied, starts."""
    for change in error.alternatives:
        for name, value in change.items():
            assert (f"{flag(name)} {value}" if value else f"without {flag(name)}") in str(error)
        found = resolve(config.replace(change), of)
        assert found.equation.reserve >= 0
        for name, value in change.items():
            if value is not None:
                assert getattr(found, name) == value


@pytest.mark.parametrize(
    ("of", "flags", "advised"),
    [
        (gpu(), {"mem_fraction_static": 0.1}, {"mem_fraction_static", "max_total_tokens"}),
        (
            gpu(24),
            {"mem_fraction_static": 0.99},
            {"mem_fraction_static", "chunked_prefill_size"},
        ),
        (
            gpu(24),
            {"mem_fraction_static": 0.95, "chunked_prefill_size": 16384},
            {"mem_fraction_static", "chunked_prefill_size"},
        ),
        (gpu(20), {"chunked_prefill_size": 16384}, {"mem_fraction_static", "chunked_prefill_size"}),
        (
            gpu(24),
            {"max_running_requests": 4000},
            {"mem_fraction_static", "max_running_requests"},
        ),
        (facts(), {"max_total_tokens": 1}, {"max_total_tokens"}),
        (facts(), {"page_size": 10**7, "mem_fraction_static": 0.5}, {"page_size"}),
        (
            gpu(),
            {"chunked_prefill_size": -1, "max_prefill_tokens": 10**6},
            {"chunked_prefill_size"},
        ),
    ],
)  # fmt: skip
def test_infeasible_settings_name_flags_and_values_that_work(
    of: ModelFacts, flags: dict[str, Any], advised: set[str]
) -> None:
    config = EngineConfig.from_flags(flags)
    with pytest.raises(Infeasible) as raised:
        resolve(config, of)
    named = {name for change in raised.value.alternatives for name, v in change.items() if v}
    assert named == advised, str(raised.value)
    check_advice(config, of, raised.value)


def test_two_flags_together_where_none_alone_is_enough() -> None:
    of = gpu(20, free_bytes=int(1.5 * GB), step_bytes_per_token=10**6)
    config = EngineConfig.from_flags({"mem_fraction_static": 0.99, "max_running_requests": 4000})
    with pytest.raises(Infeasible, match=r"set --\S+ \S+ and --\S+ \S+") as raised:
        resolve(config, of)
    assert len(raised.value.alternatives) == 1
    check_advice(config, of, raised.value)


def test_hopeless_memory_says_so() -> None:
    with pytest.raises(Infeasible, match="no setting helps") as raised:
        resolved(facts(free_bytes=10))
    assert raised.value.alternatives == () and "weights take" in str(raised.value)


COUNTS = st.sampled_from([None, 1, 7, 64, 500, 4096, 10**5])


@settings(max_examples=150, deadline=None)
@given(
    weights=st.integers(0, 10**11),
    free=st.integers(1, 10**11),
    per_token=st.integers(10, 10**6),
    step=st.integers(10, 10**6),
    row=st.integers(10, 10**7),
    is_host=st.booleans(),
    fraction=st.none() | st.floats(0.01, 0.99),
    counts=st.tuples(COUNTS, COUNTS, COUNTS),
    page=st.sampled_from([None, 1, 16, 1000]),
)
def test_what_resolves_fits_and_what_does_not_is_advised_well(
    weights: int,
    free: int,
    per_token: int,
    step: int,
    row: int,
    is_host: bool,
    fraction: float | None,
    counts: tuple[int | None, ...],
    page: int | None,
) -> None:
    of = facts(
        weight_bytes=weights, free_bytes=free, capacity_bytes=weights + free, is_host=is_host,
        bytes_per_token=per_token, step_bytes_per_token=step, step_bytes_per_row=row,
    )  # fmt: skip
    config = EngineConfig.from_flags({
        "mem_fraction_static": fraction, "page_size": page, "max_total_tokens": counts[0],
        "max_running_requests": counts[1], "chunked_prefill_size": counts[2],
    })  # fmt: skip
    try:
        found = resolve(config, of)
    except Infeasible as error:
        assert re.search(r"set --|no setting helps", str(error))
        check_advice(config, of, error)
        return
    assert found.equation.reserve >= 0 and found.max_total_tokens >= 2
    assert found.max_total_tokens % found.page_size == 0
    assert 1 <= found.max_running_requests <= found.max_total_tokens // 2
    names = ("context_length", "page_size", "chunked_prefill_size", "mem_fraction_static",
             "max_total_tokens", "max_running_requests")  # fmt: skip
    assert set(found.reasons) == set(names)
