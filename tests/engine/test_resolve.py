from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.engine import ConfigError
from treadle.engine.config import EngineConfig
from treadle.engine.memory import GB, MIB, ModelFacts
from treadle.engine.resolve import Infeasible, Resolved, context_length, resolve
from treadle.engine.settings import flag
from treadle.graphs.buckets import decode_ladder, prefill_ladder


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


GRAPH_NAMES = {
    "cuda_graph_max_bs", "cuda_graph_bs", "piecewise_cuda_graph_max_tokens",
    "piecewise_cuda_graph_tokens", "cuda_graph_backend_decode", "cuda_graph_backend_prefill",
}  # fmt: skip


def test_graphs_of_a_gpu_are_sglangs() -> None:
    found = resolved(gpu(), graph_capture_budget_ms=7, warmup_graphs=True)
    assert found.graphs.decode_rows == decode_ladder(256)
    assert found.graphs.prefill_tokens == prefill_ladder(8192)
    assert found.graphs.capture_budget_ms == 7 and found.graphs.warmup and found.graphs.padding
    assert found.graphs.reserve_bytes == (2 * 256 + 8 * 58) * MIB == found.equation.graphs
    assert found.reasons["cuda_graph_max_bs"] == "usual for a GPU of 80 GB"
    assert found.config.graphs.cuda_graph_max_bs == 256
    assert found.config.graphs.cuda_graph_bs == decode_ladder(256)
    assert found.graphs.buckets.rows_for(17) == 24 and found.graphs.buckets.tokens_for(33) == 48


def test_graphs_of_a_host_are_fine_and_take_no_memory() -> None:
    found = resolved(max_running_requests=100)
    assert found.graphs.decode_rows == decode_ladder(100, dense=True)
    assert found.graphs.prefill_tokens == prefill_ladder(512)
    assert found.graphs.reserve_bytes == found.equation.graphs == 0


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        ({"cuda_graph_max_bs": 30}, (1, 2, 4, 8, 12, 16, 24, 30)),
        ({"cuda_graph_bs": [9, 1, 4, 9]}, (1, 4, 9)),
        ({"cuda_graph_bs_decode": (5,), "cuda_graph_max_bs": 64}, (5,)),
        ({"max_running_requests": 10}, (1, 2, 4, 8, 10)),
        ({"max_running_requests": 10, "cuda_graph_max_bs": 512}, (1, 2, 4, 8, 10)),
        ({"max_running_requests": 10, "cuda_graph_bs": [4, 20, 40]}, (4, 10)),
        ({"cuda_graph_max_bs": 3, "disable_cuda_graph_padding": True}, (1, 2, 3)),
        ({"disable_decode_cuda_graph": True, "cuda_graph_max_bs": 8}, ()),
        ({"disable_cuda_graph": True}, ()),
        ({"disable_cuda_graph": True, "cuda_graph_backend_decode": "full",
          "cuda_graph_max_bs": 2}, (1, 2)),
        ({"cuda_graph_config": {"decode": {"max_bs": 2}}, "cuda_graph_bs": [4, 8]}, (1, 2)),
        ({"cuda_graph_config": {"decode": {"bs": [6, 3]}}, "cuda_graph_max_bs": 2}, (3, 6)),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}},
          "cuda_graph_backend_decode": "full"}, ()),
        ({"cuda_graph_config": {"decode": {"backend": "full"}}, "disable_decode_cuda_graph": True,
          "cuda_graph_bs": [2]}, (2,)),
    ],
)  # fmt: skip
def test_decode_graphs_follow_the_flags(flags: dict[str, Any], rows: tuple[int, ...]) -> None:
    found = resolved(gpu(), **flags)
    assert found.graphs.decode_rows == rows
    prefill = 8 * len(found.graphs.prefill_tokens)
    assert found.graphs.reserve_bytes == (2 * max(rows, default=0) + prefill) * MIB
    assert found.config.graphs.cuda_graph_backend_decode == ("full" if rows else "disabled")
    assert resolve(found.config, gpu()).graphs == found.graphs


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({"piecewise_cuda_graph_max_tokens": 20}, (4, 8, 12, 16, 20)),
        ({"cuda_graph_max_bs_prefill": 18}, (4, 8, 12, 16, 18)),
        ({"piecewise_cuda_graph_tokens": [512, 64]}, (64, 512)),
        ({"chunked_prefill_size": 300, "cuda_graph_bs_prefill": [64, 512]}, (64, 300)),
        ({"chunked_prefill_size": 10}, (4, 8, 10)),
        ({"max_total_tokens": 14}, (4, 8, 12, 14)),
        ({"disable_piecewise_cuda_graph": True}, ()),
        ({"disable_prefill_cuda_graph": True, "cuda_graph_bs_prefill": [64]}, ()),
        ({"cuda_graph_backend_prefill": "disabled"}, ()),
        ({"disable_cuda_graph": True, "enable_piecewise_cuda_graph": True}, ()),
        ({"disable_cuda_graph": True, "cuda_graph_backend_prefill": "breakable",
          "cuda_graph_bs_prefill": [9]}, (9,)),
        ({"cuda_graph_config": {"prefill": {"bs": [7]}}, "cuda_graph_max_bs_prefill": 3}, (7,)),
        ({"cuda_graph_config": {"prefill": {"backend": "disabled"}}}, ()),
    ],
)  # fmt: skip
def test_prefill_graphs_follow_the_flags(flags: dict[str, Any], tokens: tuple[int, ...]) -> None:
    found = resolved(gpu(), **flags)
    assert found.graphs.prefill_tokens == tokens
    decode = 2 * max(found.graphs.decode_rows, default=0)
    assert found.graphs.reserve_bytes == (decode + 8 * len(tokens)) * MIB
    assert resolve(found.config, gpu()).graphs == found.graphs


def test_whole_prompts_have_graphs_up_to_the_token_limit() -> None:
    found = resolved(gpu(141), chunked_prefill_size=-1)
    assert found.graphs.prefill_tokens == prefill_ladder(16384)


def test_memory_of_graphs_that_are_disabled_goes_to_the_pool() -> None:
    on, off = resolved(gpu(48)), resolved(gpu(48), disable_cuda_graph=True)
    assert off.equation.graphs == 0 and off.max_total_tokens > on.max_total_tokens
    assert off.mem_fraction_static > on.mem_fraction_static


def test_reasons_of_graphs_name_what_decided() -> None:
    found = resolved(
        gpu(), disable_cuda_graph=True, max_running_requests=8,
        cuda_graph_config={"decode": {"backend": "full"}},
    )  # fmt: skip
    assert found.reasons["cuda_graph_backend_decode"] == "--cuda-graph-config"
    assert found.reasons["cuda_graph_backend_prefill"] == "--disable-cuda-graph"
    assert found.reasons["cuda_graph_max_bs"] == "no more run at once"
    assert found.reasons["piecewise_cuda_graph_tokens"] == "there are no such graphs"


def test_decode_graphs_that_are_cut_are_not_built_and_said_so() -> None:
    found = resolved(gpu(), cuda_graph_backend_decode="breakable")
    assert found.config.graphs.cuda_graph_backend_decode == "full" and found.graphs.decode_rows
    assert found.warnings == ("--cuda-graph-backend-decode breakable is not built: full is used",)


def test_contradictions_between_graph_flags_are_found_again_when_solving() -> None:
    config = EngineConfig().replace({"cuda_graph_bs": [8], "cuda_graph_max_bs": 4})
    with pytest.raises(ConfigError, match="--cuda-graph-max-bs 4 is below 8 of --cuda-graph-bs"):
        resolve(config, gpu())


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
                assert found.config.values()[name] == value


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
        (
            gpu(24, max_position=4096),
            {"cuda_graph_max_bs": 4096, "chunked_prefill_size": 64, "max_running_requests": 4096,
             "max_total_tokens": 9000, "mem_fraction_static": 0.8},
            {"mem_fraction_static", "cuda_graph_max_bs"},
        ),
        (
            gpu(24, max_position=4096),
            {"cuda_graph_bs": [1, 4096], "chunked_prefill_size": 64, "max_running_requests": 4096,
             "max_total_tokens": 9000, "mem_fraction_static": 0.8},
            {"mem_fraction_static", "cuda_graph_max_bs"},
        ),
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
    assert set(found.reasons) == {*names, *GRAPH_NAMES}
    rows, tokens = found.graphs.decode_rows, found.graphs.prefill_tokens
    assert sorted(set(rows)) == list(rows) and 1 <= rows[-1] <= found.max_running_requests
    assert sorted(set(tokens)) == list(tokens) and tokens[-1] <= found.equation.step_tokens
    assert found.graphs.reserve_bytes == found.equation.graphs
