"""Makes tiny random checkpoints: Hugging Face folders that can be served, and GGUF files of them.

Knows transformers and the gguf writer, so that what Treadle reads was written by others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from treadle.tools.tiny_gguf import write_gguf

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 384

_SIZES: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXTRA: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CORPUS = (
    "the weaver works the loom with one foot on the treadle and the thread runs over and under",
    "every warp moves when the pedal moves, and the cloth grows row by row, hour after hour",
    "what is the capital of France? The capital of France is Paris, and the river is the Seine.",
    "numbers such as 1, 2, 3, 10, 100 and 2024 stand beside words like naïve, Straße and 日本語",
)


def make_folder(
    out: Path,
    arch: str = "llama",
    *,
    overrides: Mapping[str, object] | None = None,
    seed: int = 0,
    shards: int = 1,
) -> Path:
    """Writes config, fp32 safetensors and a tokenizer with a chat template; returns the folder.

    overrides: config values that replace the tiny defaults.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"architecture {arch!r} is not known; known: {', '.join(ARCHITECTURES)}")
    config = AutoConfig.for_model(arch, **{**_SIZES, **_EXTRA[arch], **(overrides or {})})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = _random_weights(model.state_dict(), seed)
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0).save_pretrained(out)
    _write_shards(out, tensors, shards)
    write_tokenizer(out)
    return out


def make_gguf(folder: Path, out: Path, block_format: str = "F32") -> Path:
    """Writes the folder's model as GGUF, matrices in the block format; returns the file.

    block_format: a name that the gguf package can quantize to (F32, F16, BF16, Q4_0, Q8_0, …).
    """
    write_gguf(folder, out, block_format)
    return out


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of a few merges: it encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _random_weights(state: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights that make attention and logits neither flat nor saturated, whatever the layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    tensors = {}
    for name, tensor in state.items():
        if name.endswith(".bias"):
            tensors[name] = normal(tensor, 0.5)
        elif tensor.ndim == 1:
            tensors[name] = torch.rand(tensor.shape, generator=generator) + 0.5
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = normal(tensor, 1.0)
        else:
            tensors[name] = normal(tensor, 1.5 / math.sqrt(tensor.shape[1]))
    return tensors


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="treadle.tools.tiny_model", description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama")
    parser.add_argument("--config", type=json.loads, default={}, help="config values, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--gguf", metavar="FORMAT", help="also write OUT/model.gguf: F32, Q8_0 …")
    options = parser.parse_args(argv)
    make_folder(
        options.out,
        options.arch,
        overrides=options.config,
        seed=options.seed,
        shards=options.shards,
    )
    if options.gguf:
        make_gguf(options.out, options.out / "model.gguf", options.gguf)
    return 0


if __name__ == "__main__":
    sys.exit(main())
