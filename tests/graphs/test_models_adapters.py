"""Configs become the specs that transformers' own config classes imply."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import AutoConfig

from treadle.graphs.models.adapters.registry import find_adapter, find_gguf_adapter
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import DecoderSpec

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read(arch: str, **values: object) -> DecoderSpec:
    return find_adapter([ARCHITECTURES[arch]]).spec(HfConfig({**SIZES, **values}))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_missing_keys_take_the_architecture_defaults(arch: str) -> None:
    if arch.startswith("qwen"):
        spec = read(arch, num_attention_heads=32, hidden_size=1024)
        theirs = AutoConfig.for_model(
            arch, **{**SIZES, "num_attention_heads": 32, "hidden_size": 1024}
        )
    else:
        spec, theirs = read(arch), AutoConfig.for_model(arch, **SIZES)
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.max_position == theirs.max_position_embeddings
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.head_dim == (
        getattr(theirs, "head_dim", None) or spec.hidden_size // spec.num_heads
    )
    assert spec.rope.theta == theirs.rope_parameters["rope_theta"]
    assert spec.tied_head == theirs.tie_word_embeddings
    window = theirs.sliding_window if arch == "mistral" else None
    assert spec.windows == (window,) * 4


def test_null_kv_heads_mean_as_many_as_query_heads() -> None:
    assert read("mistral", num_key_value_heads=None).num_kv_heads == 8


def test_mistral_null_window_means_none() -> None:
    assert read("mistral", sliding_window=None).windows == (None,) * 4
    assert read("mistral", sliding_window=77).windows == (77,) * 4


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_windows_follow_transformers(arch: str) -> None:
    base: dict[str, Any] = {"num_key_value_heads": 4, "sliding_window": 50}
    for change in (
        {},
        {"use_sliding_window": False, "max_window_layers": 1},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"use_sliding_window": True, "sliding_window": None},
    ):
        values = {**base, **change}
        theirs = AutoConfig.for_model(arch, **SIZES, **values)
        expected = tuple(
            theirs.sliding_window if kind == "sliding_attention" else None
            for kind in theirs.layer_types
        )
        assert read(arch, **values).windows == expected


def test_biases_and_norms_follow_the_architecture() -> None:
    def traits(spec: DecoderSpec) -> tuple[bool, bool, bool, bool]:
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm

    assert traits(read("llama")) == (False, False, False, False)
    assert traits(read("llama", attention_bias=True)) == (True, True, False, False)
    assert traits(read("llama", mlp_bias=True)) == (False, False, True, False)
    assert traits(read("mistral")) == (False, False, False, False)
    assert traits(read("qwen2", num_key_value_heads=4)) == (True, False, False, False)
    assert traits(read("qwen3", num_key_value_heads=4)) == (False, False, False, True)


def test_dtype_and_eos_are_read_from_either_key() -> None:
    assert read("llama", torch_dtype="bfloat16").dtype == "bfloat16"
    assert read("llama", dtype="float16", torch_dtype="bfloat16").dtype == "float16"
    assert read("llama", dtype="torch.float32").dtype == "float32"
    assert read("llama", eos_token_id=7).eos_token_ids == (7,)
    assert read("llama", eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert read("llama").eos_token_ids == ()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_placements_fill_every_parameter_exactly_once(arch: str) -> None:
    values: dict[str, object] = {"num_key_value_heads": 4, "head_dim": 16}
    for change in ({}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}):
        adapter = find_adapter([ARCHITECTURES[arch]])
        spec = adapter.spec(HfConfig({**SIZES, **values, **change}))
        shapes = parameter_shapes(spec)
        covered: dict[str, list[int]] = {name: [] for name in shapes}
        for placement in adapter.placements(spec):
            covered[placement.parameter] += range(placement.row, placement.row + placement.shape[0])
            assert placement.shape[1:] == shapes[placement.parameter][1:]
        for name, rows in covered.items():
            assert sorted(rows) == list(range(shapes[name][0])), name


def test_model_type_serves_where_no_architecture_is_named() -> None:
    assert find_adapter([], "qwen3").architecture == "Qwen3ForCausalLM"
    assert find_gguf_adapter("llama").architecture == "LlamaForCausalLM"


def test_unknown_architecture_lists_the_known_ones() -> None:
    known = "known: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    with pytest.raises(ValueError, match=f"BertModel is not supported; {known}"):
        find_adapter(["BertModel"], "llama")
    with pytest.raises(ValueError, match="bert is not supported"):
        find_adapter([], "bert")
    with pytest.raises(ValueError, match="mamba is not supported; known: llama, mistral, qwen2"):
        find_gguf_adapter("mamba")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"hidden_size": None},
            "hidden_size: expected a whole number of at least 1, found nothing",
        ),
        ({"hidden_size": "96"}, "hidden_size: expected a whole number of at least 1, found '96'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected .* found 0"),
        ({"vocab_size": True}, "vocab_size: expected .* found True"),
        ({"intermediate_size": 1.5}, "intermediate_size: expected .* found 1.5"),
        ({"num_key_value_heads": 3}, "8 query heads cannot share 3 kv heads evenly"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; known: silu"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false, found 'no'"),
        ({"rope_scaling": [4]}, re.escape("rope_scaling: expected an object, found [4]")),
        ({"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list of them"),
        ({"dtype": "int4"}, "dtype 'int4' is not supported; known: float32"),
        ({"dtype": 16}, "dtype: expected a string, found 16"),
    ],
)
def test_wrong_config_names_the_key(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read("llama", **values)
