"""Writes a small Hugging Face folder as GGUF, the way the format's own converter lays it out.

Knows the gguf package; takes nothing from Treadle's reader, so that the two can be compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[np.float32]
_ARCHITECTURES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "mistral": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, "qwen2"),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, "qwen3"),
}


def write_gguf(folder: Path, out: Path, block_format: str) -> None:
    """Raises: ValueError for a config or block format that GGUF cannot express here."""
    config = json.loads((folder / "config.json").read_text())
    model_type = config["model_type"]
    arch, arch_name = _ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(out, arch_name)
    _write_metadata(writer, config)
    _write_tokenizer(writer, folder)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if model_type in ("llama", "mistral"):
                tensor = _interleave(name, tensor, config)
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            _write_tensor(writer, gguf_name, tensor, block_format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tensor(writer: Any, name: str, tensor: Array, block_format: str) -> None:
    kind = gguf.GGMLQuantizationType[block_format if tensor.ndim > 1 else "F32"]
    data = gguf.quantize(np.ascontiguousarray(tensor, dtype=np.float32), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _write_metadata(writer: Any, config: Mapping[str, Any]) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    elif config.get("use_sliding_window"):
        raise ValueError("GGUF has no key for a window in some of the layers")
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    _write_rope_scaling(writer, rope, config["max_position_embeddings"], head_dim)


def _write_rope_scaling(
    writer: Any, rope: Mapping[str, Any], max_position: int, head_dim: int
) -> None:
    kind = rope["rope_type"]
    if kind == "default":
        return
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, head_dim))
        return
    if kind not in ("linear", "yarn", "longrope"):
        raise ValueError(f"GGUF has no key for rope_type {kind}")
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    original = rope.get("original_max_position_embeddings", max_position)
    if kind == "longrope":
        factor = max_position / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for name in ("long", "short"):
            divisors = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", divisors)
    else:
        writer.add_rope_scaling_factor(rope["factor"])
    if kind != "linear":
        writer.add_rope_scaling_orig_ctx_len(original)


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Array:
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def _interleave(name: str, tensor: Array, config: Mapping[str, Any]) -> Array:
    """Llama's q and k rows: halves of a head become neighbouring pairs."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    if key is None:
        return tensor
    halves = tensor.reshape(config[key], 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _write_tokenizer(writer: Any, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if t in special else kinds.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocab[settings["bos_token"]])
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    writer.add_pad_token_id(vocab[settings["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])
