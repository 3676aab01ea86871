"""Qwen2 and Qwen2.5: biases on queries, keys and values; a window in the upper layers on request.

Knows its config keys only.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.graphs.models.adapters.base import Adapter, Defaults, layer_windows, read_common
from treadle.graphs.models.adapters.names import llama_placements
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.spec import DecoderSpec


def _spec(config: HfConfig) -> DecoderSpec:
    defaults = Defaults(max_position=32_768, kv_heads=32)
    spec = read_common(config, "Qwen2ForCausalLM", defaults)
    return replace(spec, qkv_bias=True, windows=layer_windows(config, spec.num_layers))


QWEN2 = Adapter(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    gguf_names=("qwen2",),
    gguf_interleaves=False,
    spec=_spec,
    placements=llama_placements,
)
