"""Qwen3, dense: norms on queries and keys, a head dimension of its own.

Knows its config keys only.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.graphs.models.adapters.base import Adapter, Defaults, layer_windows, read_common
from treadle.graphs.models.adapters.names import llama_placements
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.spec import DecoderSpec


def _spec(config: HfConfig) -> DecoderSpec:
    defaults = Defaults(max_position=32_768, kv_heads=32, head_dim=128)
    spec = read_common(config, "Qwen3ForCausalLM", defaults)
    bias = config.flag("attention_bias", False)
    windows = layer_windows(config, spec.num_layers)
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias, windows=windows)


QWEN3 = Adapter(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    gguf_names=("qwen3",),
    gguf_interleaves=False,
    spec=_spec,
    placements=llama_placements,
)
