"""The decoder's logits equal transformers' on the same random checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.tools.tiny_model import VOCAB_SIZE, make_folder, make_gguf

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.7 * i for i in range(8)],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(parameters: Mapping[str, object], theta: float = 10_000.0) -> dict[str, object]:
    return {
        "rope_parameters": {"rope_theta": theta, **parameters},
        "max_position_embeddings": 128,
    }


VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-theta": ("llama", rope({"rope_type": "default"}, 500_000.0)),
    "llama-linear": ("llama", rope({"rope_type": "linear", "factor": 3.0})),
    "llama-dynamic": ("llama", rope({"rope_type": "dynamic", "factor": 2.0})),
    "llama-yarn": ("llama", rope(YARN)),
    "llama-yarn-mscale": (
        "llama",
        rope({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 16.0}),
    ),
    "llama-longrope": ("llama", rope(LONGROPE)),
    "llama-llama3": ("llama", rope(LLAMA3)),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-upper-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
}
IN_GGUF = [
    name
    for name in VARIANTS
    if name not in ("llama-gelu", "llama-dynamic", "llama-yarn-mscale")
    and not name.startswith(("qwen2-upper", "qwen2-layer", "qwen3-windows"))
]

Prompts = list[list[int]]
Check = Callable[[Tensor, Tensor], None]


def make_prompts(lengths: Sequence[int]) -> Prompts:
    return [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(
    name: str,
    tmp_path: Path,
    load_host: Any,
    make_runner: Any,
    reference_logits: Any,
    assert_logits_close: Check,
) -> None:
    arch, overrides = VARIANTS[name]
    folder = make_folder(tmp_path, arch, overrides=overrides, seed=random.randrange(1000))
    prompts = make_prompts([41, 1, 66])
    if name == "llama-longrope":  # prompts on the same side of the trained length as the context
        prompts = make_prompts([41, 33, 66])
    found = make_runner(load_host(folder), rows=3).step(prompts)
    for ours, theirs in zip(found, reference_logits(folder, prompts), strict=True):
        assert_logits_close(ours, theirs)


@pytest.mark.parametrize("name", IN_GGUF)
def test_logits_equal_transformers_through_gguf(
    name: str,
    tmp_path: Path,
    load_host: Any,
    make_runner: Any,
    reference_logits: Any,
    assert_logits_close: Check,
) -> None:
    arch, overrides = VARIANTS[name]
    folder = make_folder(tmp_path, arch, overrides=overrides, seed=random.randrange(1000))
    file = make_gguf(folder, tmp_path / "tiny.gguf")
    prompts = make_prompts([50])
    [found] = make_runner(load_host(file)).step(prompts)
    assert_logits_close(found, reference_logits(folder, prompts)[0])


@pytest.mark.parametrize(("arch", "page_size"), [("mistral", 1), ("qwen3", 3), ("llama", 16)])
def test_logits_do_not_depend_on_chunks(
    arch: str,
    page_size: int,
    tmp_path: Path,
    load_host: Any,
    make_runner: Any,
    assert_logits_close: Check,
) -> None:
    decoder = load_host(make_folder(tmp_path, arch, seed=3))
    prompts = make_prompts([40, 40, 40])
    whole = make_runner(decoder, rows=3).step(prompts)
    chunked = make_runner(decoder, rows=3, page_size=page_size)
    pieces: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for sizes in ([17, 1, 5], [1, 16, 1], [1, 1, 13], [21, 22, 21]):
        chunk = [p[n : n + size] for p, n, size in zip(prompts, done, sizes, strict=True)]
        for row, logits in enumerate(chunked.step(chunk)):
            pieces[row].append(logits)
        done = [n + size for n, size in zip(done, sizes, strict=True)]
    assert done == [40, 40, 40]
    for row in range(3):
        assert_logits_close(torch.cat(pieces[row]), whole[row])


def test_dynamic_ntk_equals_transformers_at_the_served_context(
    tmp_path: Path,
    load_host: Any,
    make_runner: Any,
    reference_logits: Any,
    assert_logits_close: Check,
) -> None:
    overrides = rope({"rope_type": "dynamic", "factor": 2.0})
    folder = make_folder(tmp_path, "llama", overrides=overrides)
    prompts = make_prompts([256])
    [found] = make_runner(load_host(folder, max_position=256)).step(prompts)
    assert_logits_close(found, reference_logits(folder, prompts)[0])


def test_longrope_within_the_trained_length_uses_short_factors(
    tmp_path: Path,
    load_host: Any,
    make_runner: Any,
    reference_logits: Any,
    assert_logits_close: Check,
) -> None:
    folder = make_folder(tmp_path, "llama", overrides=rope(LONGROPE))
    prompts = make_prompts([32])
    [found] = make_runner(load_host(folder, max_position=32)).step(prompts)
    assert_logits_close(found, reference_logits(folder, prompts)[0])


def test_bf16_follows_fp32(
    tmp_path: Path, load_host: Any, make_runner: Any, reference_logits: Any
) -> None:
    folder = make_folder(tmp_path, "qwen2", seed=5)
    prompts = make_prompts([30])
    [found] = make_runner(load_host(folder, dtype=torch.bfloat16)).step(prompts)
    [expected] = reference_logits(folder, prompts)
    assert found.dtype == torch.float32
    spread = (expected.max() - expected.min()).item()
    assert 0 < (found - expected).abs().max().item() < 0.1 * spread


@pytest.mark.model
def test_smollm2_logits_equal_transformers(
    smollm2_gguf: Path,
    smollm2_reference: Any,
    load_host: Any,
    make_runner: Any,
    assert_logits_close: Check,
) -> None:
    prompts = [[random.randrange(49152) for _ in range(length)] for length in (64, 7, 1)]
    found = make_runner(load_host(smollm2_gguf, max_position=64), rows=3).step(prompts)
    for ours, prompt in zip(found, prompts, strict=True):
        with torch.inference_mode():
            theirs = smollm2_reference(torch.tensor([prompt])).logits[0]
        assert_logits_close(ours, theirs)
