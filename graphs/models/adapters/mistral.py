"""Mistral: Llama's layers, with a sliding window over all of them.

Knows its config keys only.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.graphs.models.adapters.base import Adapter, Defaults, read_common
from treadle.graphs.models.adapters.names import llama_placements
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.spec import DecoderSpec

_DEFAULT_WINDOW = 4096  # tokens, where the config has no key; a null means no window


def _spec(config: HfConfig) -> DecoderSpec:
    defaults = Defaults(max_position=131_072, kv_heads=8)
    spec = read_common(config, "MistralForCausalLM", defaults)
    window: int | None = _DEFAULT_WINDOW
    if config.has("sliding_window"):
        window = config.size("sliding_window") if config.get("sliding_window") else None
    return replace(spec, windows=(window,) * spec.num_layers)


MISTRAL = Adapter(
    architecture="MistralForCausalLM",
    model_type="mistral",
    gguf_names=("mistral",),
    gguf_interleaves=True,
    spec=_spec,
    placements=llama_placements,
)
