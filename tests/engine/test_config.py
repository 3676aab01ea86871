from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from treadle.engine import ConfigError
from treadle.engine.config import EngineConfig
from treadle.engine.settings import kind_of, names_of


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
        ({"cuda_graph_max_bs": 0}, "--cuda-graph-max-bs must be an integer of at least 1, got 0"),
        ({"cuda_graph_max_bs_decode": 0}, "--cuda-graph-max-bs must be"),
        ({"cuda_graph_bs": []}, r"--cuda-graph-bs must be a list of integers of at least 1, got"),
        ({"cuda_graph_bs": [4, 0]}, "--cuda-graph-bs must be a list of integers of at least 1"),
        ({"cuda_graph_bs": [4, True]}, "--cuda-graph-bs must be a list"),
        ({"cuda_graph_bs": "1,2"}, "--cuda-graph-bs must be a list"),
        ({"piecewise_cuda_graph_tokens": 64}, "--piecewise-cuda-graph-tokens must be a list"),
        ({"graph_capture_budget_ms": -1}, "--graph-capture-budget-ms must be a number of at least"),
        ({"graph_capture_budget_ms": float("inf")}, "--graph-capture-budget-ms must be"),
        ({"cuda_graph_backend_decode": "eager"}, "decode must be one of full, breakable, disabled"),
        ({"cuda_graph_backend_prefill": "full"}, "they are breakable .* or disabled"),
        (
            {"cuda_graph_max_bs": 8, "cuda_graph_max_bs_decode": 16},
            "--cuda-graph-max-bs and --cuda-graph-max-bs-decode are one setting, got both 8 and 16",
        ),
        (
            {"cuda_graph_bs": [1, 2, 16], "cuda_graph_max_bs": 8},
            "--cuda-graph-max-bs 8 is below 16 of --cuda-graph-bs",
        ),
        (
            {"cuda_graph_bs_prefill": [512], "cuda_graph_max_bs_prefill": 64},
            "--piecewise-cuda-graph-max-tokens 64 is below 512 of --piecewise-cuda-graph-tokens",
        ),
        (
            {"cuda_graph_backend_decode": "full", "disable_decode_cuda_graph": True},
            "--cuda-graph-backend-decode full contradicts --disable-decode-cuda-graph",
        ),
        (
            {"enable_piecewise_cuda_graph": True, "disable_prefill_cuda_graph": True},
            "--enable-piecewise-cuda-graph contradicts --disable-piecewise-cuda-graph",
        ),
        ({"cuda_graph_config": "{}"}, "--cuda-graph-config must be a JSON object"),
        ({"cuda_graph_config": {"verify": {}}}, "may hold decode, prefill, not 'verify'"),
        (
            {"cuda_graph_config": {"decode": {"bss": [1]}}},
            "may hold backend, max_bs, bs, not 'bss'",
        ),
        ({"cuda_graph_config": {"prefill": 3}}, "prefill must be a JSON object"),
        ({"cuda_graph_config": {"prefill": {"max_bs": 0}}}, "prefill.max_bs must be an integer of"),
        (
            {"cuda_graph_config": {"decode": {"bs": [2, "x"]}}},
            "decode.bs must be a list of integers",
        ),
        ({"cuda_graph_config": {"decode": {"max_bs": 1, "bs": [2]}}}, "decode.max_bs 1 is below 2"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "they are breakable"),
        (
            {"cuda_graph_config": {"decode": {"backend": "on"}}},
            "decode.backend must be one of full",
        ),
        ({"attention_backend": 3}, "--attention-backend must be text"),
        ({"tp_size": 0}, "--tp-size must be an integer of at least 1, got 0"),
        ({"tp": 2.0}, "--tp-size must be"),
        (
            {"tp": 2, "tensor_parallel_size": 4},
            "--tp-size and --tp and --tensor-parallel-size are one setting, got both 2 and 4",
        ),
        ({"nnodes": 0}, "--nnodes must be an integer of at least 1, got 0"),
        ({"node_rank": -1}, "--node-rank must be an integer of at least 0, got -1"),
        ({"dist_init_addr": 5000}, "--dist-init-addr must be text"),
        ({"nccl_port": 0}, "--nccl-port must be .* at least 1 and below 65536, got 0"),
        ({"nccl_port": 65536}, "--nccl-port must be"),
        ({"dist_timeout": 0}, "--dist-timeout must be an integer of at least 1, got 0"),
        ({"base_gpu_id": -1}, "--base-gpu-id must be an integer of at least 0, got -1"),
        ({"enable_p2p_check": 1}, "--enable-p2p-check must be true or false"),
        ({"watchdog_timeout": 0}, "--watchdog-timeout must be a number above 0, got 0"),
        ({"watchdog_timeout": float("inf")}, "--watchdog-timeout must be"),
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
        {"cuda_graph_bs": [1, 2], "cuda_graph_max_bs": 2, "graph_capture_budget_ms": 0},
        {"disable_cuda_graph": True, "cuda_graph_backend_decode": "full"},
        {"cuda_graph_backend_prefill": "disabled", "disable_piecewise_cuda_graph": True},
        {"cuda_graph_config": {"decode": {"bs": [4], "max_bs": None}, "prefill": None}},
        {"attention_backend": "triton", "sampling_backend": "pytorch", "enable_memory_saver": True},
        {"tp_size": 8, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:5000"},
        {"tp_size": 2, "nccl_port": 65535, "dist_timeout": 5, "base_gpu_id": 6},
        {"enable_p2p_check": True, "watchdog_timeout": 0.5},
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
        "cuda_graph_max_bs": None, "cuda_graph_bs": None, "disable_cuda_graph": False,
        "attention_backend": None, "graph_capture_budget_ms": 100.0, "tp_size": 1, "nnodes": 1,
        "node_rank": 0, "dist_init_addr": None, "nccl_port": None, "dist_timeout": None,
        "base_gpu_id": 0, "enable_p2p_check": False, "watchdog_timeout": 300,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected
    EngineConfig().check()


def test_replace_changes_what_it_names_and_keeps_the_rest() -> None:
    given = EngineConfig.from_flags({"page_size": 16, "schedule_policy": "lof"})
    changed = given.replace({"page_size": None, "max_total_tokens": 99})
    assert changed.values() == given.values() | {"page_size": None, "max_total_tokens": 99}
    assert given.memory.page_size == 16


ALIASES = {
    "model": ("model_path", "a/model"),
    "seed": ("random_seed", 5),
    "tp": ("tp_size", 2),
    "tensor_parallel_size": ("tp_size", 4),
    "nccl_init_addr": ("dist_init_addr", "10.0.0.1:5000"),
    "cuda_graph_max_bs_decode": ("cuda_graph_max_bs", 24),
    "cuda_graph_bs_decode": ("cuda_graph_bs", [1, 3]),
    "cuda_graph_max_bs_prefill": ("piecewise_cuda_graph_max_tokens", 512),
    "cuda_graph_bs_prefill": ("piecewise_cuda_graph_tokens", [64]),
    "disable_prefill_cuda_graph": ("disable_piecewise_cuda_graph", True),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_the_setting(alias: str) -> None:
    name, value = ALIASES[alias]
    expected = EngineConfig().values() | {name: value}
    default = EngineConfig().values()[name]
    for flags in (
        {alias: value},
        {alias: value, name: value},
        {alias: value, name: default},
        {name: value, alias: default},
    ):
        assert EngineConfig.from_flags(flags).values() == expected


def test_no_name_is_declared_twice_and_every_kind_is_known() -> None:
    groups = [getattr(EngineConfig(), each.name) for each in fields(EngineConfig)]
    declared = [each for group in groups for each in fields(group)]
    names = [name for each in declared for name in names_of(each)]
    assert len(names) == len(set(names)) == len(EngineConfig().values()) + len(ALIASES)
    kinds = {kind_of(each) for each in declared}
    assert kinds == {"int", "float", "bool", "str", "Mapping", "Sequence"}
