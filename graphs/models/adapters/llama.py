"""Llama, and what is published under its name.

Knows its config keys only.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.graphs.models.adapters.base import Adapter, Defaults, read_common
from treadle.graphs.models.adapters.names import llama_placements
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.spec import DecoderSpec


def _spec(config: HfConfig) -> DecoderSpec:
    spec = read_common(config, "LlamaForCausalLM", Defaults(max_position=2048))
    bias = config.flag("attention_bias", False)
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))


LLAMA = Adapter(
    architecture="LlamaForCausalLM",
    model_type="llama",
    gguf_names=("llama",),
    gguf_interleaves=True,
    spec=_spec,
    placements=llama_placements,
)
