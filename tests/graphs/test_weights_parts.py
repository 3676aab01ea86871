"""What ranks read of a checkpoint: the whole model's numbers at their places, and nothing else."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from safetensors import safe_open
from torch import Tensor

from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import TensorParallel, legal_sizes
from treadle.graphs.weights import gguf_source, safetensors_source
from treadle.graphs.weights.gguf_file import read_gguf
from treadle.graphs.weights.load import Loaded, load_model, read_spec, reload_parameters
from treadle.tools.tiny_model import ARCHITECTURES, make_folder, make_gguf

SIZES: dict[str, object] = {
    "vocab_size": 350, "hidden_size": 96, "num_attention_heads": 12, "intermediate_size": 192,
    "num_hidden_layers": 2,
}  # fmt: skip
KV_HEADS = {2: 2, 3: 6, 4: 2}  # by ranks; with four, two hold each kv head
EXTRA: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": {"attention_bias": True, "head_dim": 16},
}


def make(folder: Path, arch: str, kv_heads: int) -> Path:
    values = {**SIZES, "num_key_value_heads": kv_heads, **EXTRA.get(arch, {})}
    return make_folder(folder, arch, overrides=values, seed=random.randrange(1000))


def load(path: Path, load_format: str = "auto", **options: Any) -> Loaded:
    def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    chosen = {"dtype": torch.float32, **options}
    spec = read_spec(path)
    return load_model(path, spec, load_format=load_format, allocate=allocate, seed=5, **chosen)


def cut(name: str, whole: Tensor, spec: DecoderSpec, rank: int, size: int) -> Tensor:
    """The rank's part of a parameter, cut by hand."""
    kind = name.split(".", 2)[-1]
    if kind in ("embedding", "head"):
        rows = -(-len(whole) // (16 * size)) * 16
        padded = whole.new_zeros(rows * size, whole.shape[1])
        padded[: len(whole)] = whole
        return padded.chunk(size)[rank]
    if kind.startswith("qkv"):
        q, k, v = torch.split(whole, [spec.q_size, spec.kv_size, spec.kv_size])
        copies = max(1, size // spec.num_kv_heads)

        def heads(x: Tensor) -> Tensor:
            each = x.view(spec.num_kv_heads, spec.head_dim, *x.shape[1:])
            return each.repeat_interleave(copies, 0).chunk(size)[rank].flatten(0, 1)

        return torch.cat([q.chunk(size)[rank], heads(k), heads(v)])
    if kind.startswith("gate_up"):
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, 1)[rank] if kind in ("o.weight", "down.weight") else whole


@pytest.mark.parametrize("load_format", ["safetensors", "gguf", "Q8_0", "Q5_1", "dummy"])
@pytest.mark.parametrize(("arch", "size"), [*((a, 4) for a in ARCHITECTURES), ("llama", 3)])
def test_ranks_have_the_whole_models_numbers_at_their_places(
    arch: str, size: int, load_format: str, tmp_path: Path
) -> None:
    path = make(tmp_path, arch, KV_HEADS[size])
    if load_format not in ("safetensors", "dummy"):
        kind = "F32" if load_format == "gguf" else load_format
        path, load_format = make_gguf(path, tmp_path / "tiny.gguf", kind), "gguf"
    dtype = random.choice([torch.float32, torch.bfloat16])
    whole = load(path, load_format, dtype=dtype)
    for rank in range(size):
        place = TensorParallel(rank, size)
        own = load(path, load_format, dtype=dtype, parallel=place).parameters
        assert own.keys() == whole.parameters.keys()
        for name, tensor in own.items():
            expected = cut(name, whole.parameters[name], whole.decoder.spec, rank, size)
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_ranks_parameters_are_filled_again(load_format: str, tmp_path: Path) -> None:
    path, place = make(tmp_path, "qwen2", 2), TensorParallel(3, 4)
    parameters = load(path, load_format, parallel=place).parameters
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    for tensor in parameters.values():
        tensor.fill_(torch.nan)
    spec = read_spec(path)
    reload_parameters(parameters, path, spec, load_format=load_format, seed=5, parallel=place)
    assert all(torch.equal(parameters[name], before[name]) for name in before)


def note(calls: list[tuple[int, int]], done: int, total: int) -> None:
    calls.append((done, total))


def test_progress_of_a_rank_ends_at_its_own_bytes(tmp_path: Path) -> None:
    path = make(tmp_path, "llama", 2)
    for load_format in ("safetensors", "dummy"):
        calls: list[tuple[int, int]] = []
        place = TensorParallel(3, 4)
        loaded = load(path, load_format, parallel=place, progress=partial(note, calls))
        size = sum(tensor.nbytes for tensor in loaded.parameters.values())
        assert calls[-1] == (size, size)


def test_too_many_ranks_are_told_how_many_may_be(tmp_path: Path) -> None:
    path = make(tmp_path, "llama", 2)
    assert legal_sizes(read_spec(path), 12) == (1, 2, 4, 6, 12)
    with pytest.raises(ValueError, match="5 ranks cannot share .*: 1, 2, 4, 6, 12$"):
        load(path, parallel=TensorParallel(0, 5))


class Slices:
    """A tensor of an open file; counts the numbers that are taken from it."""

    def __init__(self, inner: Any, asked: dict[str, int], name: str) -> None:
        self._inner, self._asked, self._name = inner, asked, name

    def __getitem__(self, box: Any) -> Tensor:
        found: Tensor = self._inner[box]
        self._asked[self._name] = self._asked.get(self._name, 0) + found.numel()
        return found

    def get_shape(self) -> list[int]:
        return list(self._inner.get_shape())

    def get_dtype(self) -> str:
        return str(self._inner.get_dtype())


class CountedFile:
    """An open file that hands out nothing but counted slices."""

    def __init__(self, asked: dict[str, int], path: Path, framework: str) -> None:
        self._inner: Any = safe_open(path, framework=framework)
        self._asked = asked

    def keys(self) -> list[str]:
        return list(self._inner.keys())

    def get_slice(self, name: str) -> Slices:
        return Slices(self._inner.get_slice(name), self._asked, name)


@pytest.mark.parametrize("size", [2, 3])
def test_no_number_of_a_safetensors_file_is_read_twice(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "qwen3", KV_HEADS[size])
    asked: dict[str, int] = {}
    monkeypatch.setattr(safetensors_source, "safe_open", partial(CountedFile, asked))
    for rank in range(size):
        load(folder, parallel=TensorParallel(rank, size))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():
            times = size if name.endswith(("norm.weight", "o_proj.bias")) else 1
            assert asked[name] == times * file.get_tensor(name).numel(), name


@pytest.mark.parametrize(("size", "times"), [(2, 1), (4, 2)])
def test_only_the_blocks_that_a_rank_needs_are_dequantized(
    size: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """times: how often kv heads are read."""
    folder = make(tmp_path, "qwen2", 2)
    file = make_gguf(folder, tmp_path / "tiny.gguf", "Q8_0")
    kind = GGMLQuantizationType.Q8_0
    done = 0

    def count(blocks: Any, qtype: GGMLQuantizationType) -> Any:
        nonlocal done
        assert qtype is kind
        done += blocks.nbytes
        return dequantize(blocks, qtype)

    monkeypatch.setattr(gguf_source, "dequantize", count)
    for rank in range(size):
        load(file, parallel=TensorParallel(rank, size))
    block, block_bytes = GGML_QUANT_SIZES[kind]
    expected = 0
    for name, tensor in read_gguf(file).tensors.items():
        if tensor.kind is not kind:
            continue
        columns = tensor.shape[-1]
        if "attn_output" in name or "ffn_down" in name:  # cut inside of blocks where need be
            edges = np.arange(size + 1) * columns // size
            blocks = int((-(-edges[1:] // block) - edges[:-1] // block).sum())
            expected += tensor.shape[0] * blocks * block_bytes
        else:
            copies = times if "attn_k" in name or "attn_v" in name else 1
            expected += copies * tensor.blocks.nbytes
    assert done == expected
