from __future__ import annotations

import argparse
from typing import Any

import pytest

from treadle.engine.config import EngineConfig
from treadle.tools import cli


def flags(*arguments: str) -> dict[str, Any]:
    options = cli._parser().parse_args(["serve", *arguments])
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
        (["some/model", "--seed", "3"], {"model_path": "some/model", "random_seed": 3}),
    ],
)
def test_flags_become_settings(arguments: list[str], expected: dict[str, Any]) -> None:
    assert flags(*arguments) == EngineConfig().values() | expected


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
