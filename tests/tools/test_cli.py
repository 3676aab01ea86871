from __future__ import annotations

import argparse
from typing import Any

import pytest

from treadle.engine.config import EngineConfig
from treadle.tools import cli


def flags(*arguments: str) -> dict[str, Any]:
    options = cli._parser().parse_args(["serve", *map(cli._dashes, arguments)])
    return cli.engine_flags(options)


def test_without_flags_every_setting_has_its_default() -> None:
    assert flags() == EngineConfig().values()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-total-tokens", "8k"], {"max_total_tokens": 8000}),
        (["--max-prefill-tokens", "1M"], {"max_prefill_tokens": 10**6}),
        (["--mem-fraction-static", "0.7"], {"mem_fraction_static": 0.7}),
        (["--schedule-conservativeness", "2"], {"schedule_conservativeness": 2.0}),
        (["--enable-mixed-chunk"], {"enable_mixed_chunk": True}),
        (["--disable-radix-cache"], {"disable_radix_cache": True}),
        (["--default-priority-value", "-5"], {"default_priority_value": -5}),
        (["--schedule-policy", "dfs-weight"], {"schedule_policy": "dfs-weight"}),
        (
            ["--radix-eviction-policy-config", '{"protected_threshold": 3}'],
            {"radix_eviction_policy_config": {"protected_threshold": 3}},
        ),
        (["some/model", "--seed", "3"], {"model_path": "some/model", "seed": 3}),
        (["--model", "some/model"], {"model": "some/model"}),
        (["--cuda-graph-max-bs", "64"], {"cuda_graph_max_bs": 64}),
        (["--cuda_graph_max_bs_decode=64"], {"cuda_graph_max_bs_decode": 64}),
        (["--cuda-graph-bs", "1", "2", "4"], {"cuda_graph_bs": [1, 2, 4]}),
        (["--cuda_graph_bs", "1,2", "4"], {"cuda_graph_bs": [1, 2, 4]}),
        (["--cuda-graph-bs=1,2, 4"], {"cuda_graph_bs": [1, 2, 4]}),
        (["--cuda-graph-bs-decode", "8"], {"cuda_graph_bs_decode": [8]}),
        (["--piecewise-cuda-graph-max-tokens", "2k"], {"piecewise_cuda_graph_max_tokens": 2000}),
        (["--cuda-graph-max-bs-prefill", "2048"], {"cuda_graph_max_bs_prefill": 2048}),
        (["--cuda-graph-bs-prefill", "64", "512"], {"cuda_graph_bs_prefill": [64, 512]}),
        (["--piecewise-cuda-graph-tokens", "64"], {"piecewise_cuda_graph_tokens": [64]}),
        (["--disable-prefill-cuda-graph"], {"disable_prefill_cuda_graph": True}),
        (["--disable_cuda_graph"], {"disable_cuda_graph": True}),
        (["--cuda-graph-backend-decode", "full"], {"cuda_graph_backend_decode": "full"}),
        (
            ["--cuda-graph-config", '{"decode": {"bs": [1]}}'],
            {"cuda_graph_config": {"decode": {"bs": [1]}}},
        ),
        (["--graph-capture-budget-ms", "2.5"], {"graph_capture_budget_ms": 2.5}),
        (["--attention-backend", "triton"], {"attention_backend": "triton"}),
    ],
)
def test_flags_become_settings(arguments: list[str], expected: dict[str, Any]) -> None:
    given = flags(*arguments)
    assert given == EngineConfig().values() | expected
    assert EngineConfig().replace(given) == EngineConfig().replace(expected)


@pytest.mark.parametrize("text", ["", "[1]", "3", "{"])
def test_json_flags_take_objects_only(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="JSON"):
        cli.json_object(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static must be"),
        (["--max_queued_requests=0"], "--max-queued-requests must be"),
        (["--radix-eviction-policy-config", '{"x": 1}'], "--radix-eviction-policy-config"),
        (["--cuda-graph-bs", "0,1"], "--cuda-graph-bs must be a list of integers of at least 1"),
        (["--cuda-graph-bs", "4", "--cuda-graph-bs-decode", "8"], "are one setting"),
        (["--cuda-graph-bs", "4", "--cuda-graph-max-bs", "2"], "--cuda-graph-max-bs 2 is below 4"),
        (["--cuda-graph-backend-prefill", "full"], "breakable"),
        (["--cuda-graph-config", '{"prefil": {}}'], "--cuda-graph-config may hold decode, prefill"),
    ],
)
def test_illegal_values_end_with_the_flags_name(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--explain", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_unknown_flags_are_told_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--mem-fraction-statik", "0.5"])
    assert "did you mean --mem-fraction-static?" in capsys.readouterr().err
