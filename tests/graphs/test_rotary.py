"""Rotary frequencies and tables equal transformers', for every scaling and for partial rotation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from treadle.graphs.layers.rotary import Rotary, frequencies, rotary_table
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.rope_config import extended_max_position, rope_spec
from treadle.graphs.models.spec import (
    DivisorScaling,
    DynamicNtkScaling,
    LinearScaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)

HEAD_DIM = 64
MAX_POSITION = 4096


def scaling(kind: str, pairs: int) -> dict[str, object]:
    """Random but legal parameters of a rope type."""
    factor = random.uniform(1.5, 16.0)
    original = random.choice([256, 512, 1000])
    divisors = [random.uniform(1.0, 40.0) for _ in range(2 * pairs)]
    kinds: dict[str, dict[str, object]] = {
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {"factor": factor, "original_max_position_embeddings": original},
        "longrope": {
            "short_factor": divisors[:pairs],
            "long_factor": divisors[pairs:],
            "original_max_position_embeddings": original,
        },
        "llama3": {
            "factor": factor,
            "low_freq_factor": random.uniform(0.5, 2.0),
            "high_freq_factor": random.uniform(3.0, 8.0),
            "original_max_position_embeddings": original,
        },
    }
    return {"rope_type": kind, **kinds[kind]}


def config_values(rope: dict[str, object], partial: float) -> dict[str, object]:
    return {
        "hidden_size": 2 * HEAD_DIM,
        "num_attention_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": {
            "rope_theta": random.choice([10_000.0, 500_000.0]),
            "partial_rotary_factor": partial,
            **rope,
        },
    }


@pytest.mark.parametrize("partial", [1.0, 0.75])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3"])
def test_frequencies_equal_transformers(kind: str, partial: float) -> None:
    pairs = int(HEAD_DIM * partial) // 2
    for _ in range(5):
        values = config_values(scaling(kind, pairs), partial)
        spec = rope_spec(HfConfig(values), HEAD_DIM, MAX_POSITION)
        theirs = AutoConfig.for_model("llama", **values)
        expected, amplitude = ROPE_INIT_FUNCTIONS[kind](
            theirs, torch.device("cpu"), seq_len=MAX_POSITION
        )
        found, factor = frequencies(spec, MAX_POSITION)
        assert found.shape == (pairs,)
        assert factor == pytest.approx(amplitude)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_factor": 0.8},
        {"beta_fast": 20.0, "beta_slow": 2.0},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"truncate": False},
        {"beta_fast": 1.0, "beta_slow": 1.0},
        {"factor": None},
    ],
)
def test_yarn_options_equal_transformers(change: dict[str, object]) -> None:
    values = config_values({**scaling("yarn", HEAD_DIM // 2), **change}, 1.0)
    spec = rope_spec(HfConfig(values), HEAD_DIM, MAX_POSITION)
    theirs = AutoConfig.for_model("llama", **values)
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    found, factor = frequencies(spec, MAX_POSITION)
    assert factor == pytest.approx(amplitude)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def test_longrope_context_within_the_trained_length_takes_the_short_set() -> None:
    values = config_values(scaling("longrope", HEAD_DIM // 2), 1.0)
    spec = rope_spec(HfConfig(values), HEAD_DIM, MAX_POSITION)
    assert isinstance(spec.scaling, LongRopeScaling)
    original = spec.scaling.original_max_position
    theirs = AutoConfig.for_model("llama", **values)
    short, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=original)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"), seq_len=original + 1)
    assert not torch.allclose(short, long)
    torch.testing.assert_close(frequencies(spec, original)[0], short, rtol=2e-6, atol=0)
    torch.testing.assert_close(frequencies(spec, original + 1)[0], long, rtol=2e-6, atol=0)


def test_dynamic_ntk_grows_with_the_served_context() -> None:
    spec = RopeSpec(10_000.0, HEAD_DIM, DynamicNtkScaling(2.0, MAX_POSITION))
    values = config_values({"rope_type": "dynamic", "factor": 2.0}, 1.0)
    values["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    theirs = AutoConfig.for_model("llama", **values)
    plain, _ = frequencies(replace(spec, scaling=None), MAX_POSITION)
    for context in (17, MAX_POSITION):
        torch.testing.assert_close(frequencies(spec, context)[0], plain)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](
        theirs, torch.device("cpu"), seq_len=3 * MAX_POSITION
    )
    torch.testing.assert_close(frequencies(spec, 3 * MAX_POSITION)[0], expected, rtol=2e-6, atol=0)


def test_divisors_scale_each_frequency() -> None:
    divisors = tuple(random.uniform(1.0, 9.0) for _ in range(8))
    plain, _ = frequencies(RopeSpec(1e6, 16), 10)
    found, _ = frequencies(RopeSpec(1e6, 16, DivisorScaling(divisors)), 10)
    torch.testing.assert_close(found * torch.tensor(divisors), plain)


def test_table_holds_cosines_then_sines() -> None:
    spec = RopeSpec(10_000.0, 16, YarnScaling(4.0, 64, attention_factor=1.25))
    inverse, _ = frequencies(spec, 300)
    table = rotary_table(spec, 300)
    assert table.shape == (300, 16)
    for position in random.sample(range(300), 20):
        angles = position * inverse
        torch.testing.assert_close(table[position, :8], angles.cos() * 1.25)
        torch.testing.assert_close(table[position, 8:], angles.sin() * 1.25)


def test_partial_rotation_equals_transformers() -> None:
    rotary_dim, tokens = 24, 9
    spec = RopeSpec(10_000.0, rotary_dim)
    q, k = torch.randn(tokens, 4, HEAD_DIM), torch.randn(tokens, 2, HEAD_DIM)
    positions = torch.randint(0, 500, (tokens,))
    angles = positions[:, None] * frequencies(spec, 500)[0]
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None]
    )
    found = Rotary(spec, 500, torch.device("cpu"))(q, k, positions)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_older_config_keys_mean_the_same() -> None:
    older = {
        "rope_theta": 123_456.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    }
    newer = {
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 4.0,
            "rope_theta": 123_456.0,
            "partial_rotary_factor": 0.5,
        }
    }
    expected = RopeSpec(123_456.0, 32, LinearScaling(4.0))
    assert rope_spec(HfConfig(older), 64, 2048) == expected
    assert rope_spec(HfConfig(newer), 64, 2048) == expected


def test_no_rope_keys_mean_plain_rotation() -> None:
    for values in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}):
        assert rope_spec(HfConfig(values), 64, 2048) == RopeSpec(10_000.0, 64)


def test_trained_length_beside_the_rope_section_wins() -> None:
    values = {
        "original_max_position_embeddings": 512,
        "rope_scaling": {
            "type": "su",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 77,
        },
    }
    scaling = rope_spec(HfConfig(values), 16, 2048).scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.original_max_position == 512


def test_yarn_extends_the_context() -> None:
    values = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    spec = rope_spec(HfConfig({"rope_parameters": values}), 16, 1024)
    assert extended_max_position(spec, 1024) == 4096
    assert extended_max_position(spec, 8192) == 8192
    assert extended_max_position(RopeSpec(10_000.0, 16), 1024) == 1024


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type 'spiral' is not supported; known: default, linear"),
        (
            {"rope_type": "linear"},
            "rope_parameters.factor: expected a number above 0, found nothing",
        ),
        ({"rope_type": "linear", "factor": "4"}, "rope_parameters.factor: .* found '4'"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope_parameters.factor: .* found nan"),
        ({"rope_theta": -1}, "rope_parameters.rope_theta: expected a number above 0, found -1"),
        ({"partial_rotary_factor": 0.05}, "rotary dimension 3 is not a positive even number"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 32},
            "short_factor: expected 32 numbers, .* found 1",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": "x"},
            "rope_parameters.long_factor: expected a list of numbers, found 'x'",
        ),
    ],
)
def test_wrong_rope_settings_name_the_key(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_spec(HfConfig({"rope_parameters": values}), HEAD_DIM, MAX_POSITION)
