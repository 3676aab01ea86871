"""GGUF metadata -> DecoderSpec, by way of the keys that Hugging Face configs have.

Knows metadata and which tensors exist; reads only the small rope tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from gguf import GGMLQuantizationType

from treadle.graphs.models.adapters.registry import find_gguf_adapter
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.rope_config import yarn_attention_factor
from treadle.graphs.models.spec import DecoderSpec, DivisorScaling, RopeSpec
from treadle.graphs.weights.gguf_file import GgufFile, Value

_REQUIRED = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_DTYPES = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def gguf_spec(file: GgufFile) -> DecoderSpec:
    """Raises: ValueError naming the metadata key or tensor."""
    metadata = _Metadata(file)
    if metadata.get("expert_count"):
        raise ValueError(f"{metadata.arch} with experts is not supported")
    adapter = find_gguf_adapter(metadata.arch)
    spec = adapter.spec(HfConfig(metadata.config()))
    tensors = file.tensors
    window = metadata.get("attention.sliding_window")
    return replace(
        spec,
        rope=_with_divisors(_with_rotary_dim(spec, metadata), file),
        windows=(window if isinstance(window, int) and window else None,) * spec.num_layers,
        dtype=_dtype(file),
        eos_token_ids=metadata.eos_token_ids(),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        tied_head="output.weight" not in tensors,
    )


class _Metadata:
    """One architecture's keys, without their prefix."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.arch = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str) -> Value | None:
        """The value; the common one where a key has a value for each layer."""
        name = f"{self.arch}.{key}"
        value = self._file.metadata.get(name)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{name} differs between layers, which is not supported")
            common: Value = value[0]
            return common
        return value

    def config(self) -> dict[str, object]:
        if "token_embd.weight" not in self._file.tensors:
            raise ValueError("tensor token_embd.weight is missing")
        config: dict[str, object] = {
            "vocab_size": self._file.tensors["token_embd.weight"].shape[0],
            "rope_parameters": self._rope_parameters(),
        }
        for key, name in _REQUIRED.items():
            if (value := self.get(key)) is None:
                raise ValueError(f"metadata key {self.arch}.{key} is missing")
            config[name] = value
        for key, name in _OPTIONAL.items():
            if (value := self.get(key)) is not None:
                config[name] = value
        return config

    def eos_token_ids(self) -> tuple[int, ...]:
        found = (self._file.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
        return tuple(dict.fromkeys(value for value in found if isinstance(value, int)))

    def _rope_parameters(self) -> dict[str, object]:
        kind = self.get("rope.scaling.type")
        if kind in (None, "none"):
            scale = self.get("rope.scale_linear")
            return {"rope_type": "linear", "factor": scale} if scale else {}
        parameters: dict[str, object] = {
            "rope_type": kind,
            "factor": self.get("rope.scaling.factor"),
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length"),
        }
        if kind == "yarn":
            parameters |= self._yarn_parameters()
        if kind == "longrope":
            parameters["attention_factor"] = self.get("rope.scaling.attn_factor")
            parameters["short_factor"] = _numbers(self._file, "rope_factors_short.weight")
            parameters["long_factor"] = _numbers(self._file, "rope_factors_long.weight")
        return parameters

    def _yarn_parameters(self) -> dict[str, object]:
        parameters: dict[str, object] = {
            "beta_fast": self.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": self.get("rope.scaling.yarn_beta_slow"),
        }
        attn_factor = self.get("rope.scaling.yarn_attn_factor")
        attn_factor = attn_factor or self.get("rope.scaling.attn_factor")
        factor = self.get("rope.scaling.factor")
        if isinstance(attn_factor, float) and isinstance(factor, int | float):
            parameters["attention_factor"] = attn_factor * yarn_attention_factor(factor)
        return parameters


def _dtype(file: GgufFile) -> str:
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _DTYPES.get(kinds.pop(), "quantized") if len(kinds) == 1 else "quantized"


def _with_rotary_dim(spec: DecoderSpec, metadata: _Metadata) -> RopeSpec:
    rotary_dim = metadata.get("rope.dimension_count")
    if isinstance(rotary_dim, int) and rotary_dim:
        return replace(spec.rope, rotary_dim=rotary_dim)
    return spec.rope


def _with_divisors(rope: RopeSpec, file: GgufFile) -> RopeSpec:
    """Llama 3's scaling comes as a finished tensor of divisors."""
    if "rope_freqs.weight" not in file.tensors:
        return rope
    return replace(rope, scaling=DivisorScaling(tuple(_numbers(file, "rope_freqs.weight"))))


def _numbers(file: GgufFile, name: str) -> list[float]:
    if name not in file.tensors:
        raise ValueError(f"tensor {name} is missing")
    tensor = file.tensors[name]
    if tensor.kind is not GGMLQuantizationType.F32:
        raise ValueError(f"tensor {name} is {tensor.kind.name}, expected F32")
    values: list[float] = tensor.blocks.view(np.float32).ravel().tolist()
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"tensor {name} holds numbers that are no divisors")
    return values
