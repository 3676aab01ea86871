"""Safetensors folders: sharded or not, whole or broken."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.graphs.models.decoder import Decoder
from treadle.graphs.weights.load import CheckpointError, read_spec
from treadle.tools.tiny_model import make_folder

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
Load = Callable[..., Decoder]


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def parameters(decoder: Decoder) -> list[Tensor]:
    found = [decoder.embedding, decoder.final_norm.weight, decoder.head.weight]
    for layer in decoder.layers:
        found += [layer.attention_norm.weight, layer.mlp_norm.weight]
        found += [layer.attention.qkv.weight, layer.attention.o.weight]
        found += [layer.mlp.gate_up.weight, layer.mlp.down.weight]
    return found


def test_sharded_equals_single_file(tmp_path: Path, load_host: Load) -> None:
    single = load_host(make_folder(tmp_path / "single", seed=11))
    sharded_folder = make_folder(tmp_path / "sharded", seed=11, shards=3)
    assert len(list(sharded_folder.glob("*.safetensors"))) == 3
    for a, b in zip(parameters(single), parameters(load_host(sharded_folder)), strict=True):
        assert torch.equal(a, b)


def test_rows_stand_in_fused_order(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    layer = load_host(folder).layers[1]
    prefix = "model.layers.1"
    qkv = [tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.attention.qkv.weight, torch.cat(qkv))
    assert torch.equal(layer.mlp.gate_up.weight, torch.cat(gate_up))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_type_is_converted_by_torch(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path, load_host: Load
) -> None:
    folder = make_folder(tmp_path)
    rewrite(folder, lambda t: t.update({name: value.to(stored) for name, value in t.items()}))
    tensors = load_file(folder / "model.safetensors")
    decoder = load_host(folder, dtype=dtype)
    assert torch.equal(decoder.head.weight, tensors["lm_head.weight"].to(dtype))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_config_without_dtype_takes_the_stored_one(stored: torch.dtype, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, lambda t: t.update({name: value.to(stored) for name, value in t.items()}))
    assert read_spec(folder).dtype == str(stored).removeprefix("torch.")


def test_tied_head_is_the_embedding_itself(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path, overrides={"tie_word_embeddings": True})
    decoder = load_host(folder)
    assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()


def test_wrong_shape_names_tensor_expected_and_found(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    rewrite(folder, lambda t: t.update({Q_PROJ: torch.zeros(65, 64)}))
    message = rf"{Q_PROJ} does not fit the config: expected shape \[64, 64\], found \[65, 64\]"
    with pytest.raises(CheckpointError, match=message):
        load_host(folder)


def test_missing_tensors_are_named_with_their_shape(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    rewrite(folder, lambda t: (t.pop(Q_PROJ), t.pop("lm_head.weight")))
    message = rf"lacks tensors .*: {Q_PROJ} \[64, 64\], lm_head.weight \[384, 64\]$"
    with pytest.raises(CheckpointError, match=message):
        load_host(folder)


def test_many_missing_tensors_are_counted(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path, "qwen3", overrides={"num_hidden_layers": 3})
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"layers\.3.* and 7 more$"):
        load_host(folder)


def test_extra_tensors_are_logged_and_harmless_ones_are_not(
    tmp_path: Path, load_host: Load, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path, overrides={"tie_word_embeddings": True})
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda t: t.update({inv_freq: torch.ones(8), "lm_head.weight": torch.ones(9)}))
    with caplog.at_level(logging.WARNING):
        load_host(folder)
    assert not caplog.records
    rewrite(folder, lambda t: t.update({"vision.patch.weight": torch.ones(8)}))
    with caplog.at_level(logging.WARNING):
        load_host(folder)
    assert "1 tensors are not used: vision.patch.weight" in caplog.text


def test_scales_beside_the_weights_are_refused(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    rewrite(folder, lambda t: t.update({f"{Q_PROJ}_scale": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f"quantized .* not supported: it has {Q_PROJ}_scale"):
        load_host(folder)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_truncated_file_is_named(keep: float, tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        load_host(folder)


def test_corrupt_header_is_named(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        load_host(folder)


def test_integer_weights_are_refused(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    rewrite(folder, lambda t: t.update({Q_PROJ: torch.ones(64, 64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} is stored as I8, which is not supported"):
        load_host(folder)


def test_missing_shard_is_named(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_host(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "is not an index of shards"),
        ("{", "is not an index of shards"),
        ('{"weight_map": 3}', "is not an index of shards"),
        ('{"weight_map": {"a": {}}}', "is not an index of shards"),
        ('{"weight_map": {"a": "../up.safetensors"}}', "a shard outside its folder: '../up"),
    ],
)
def test_broken_index_is_refused(index: str, message: str, tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load_host(folder)


def test_files_of_other_names_are_read_without_an_index(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert load_host(folder).spec.num_layers == 3


def test_bin_files_are_refused(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only PyTorch \.bin weights"):
        load_host(folder)


def test_folder_without_weights_says_what_was_looked_for(tmp_path: Path, load_host: Load) -> None:
    folder = make_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no weights: looked for model\.safetensors"):
        load_host(folder)
