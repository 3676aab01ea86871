"""Formats, dummy weights, progress and config files that cannot be used."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from treadle.graphs.arena import HostArena
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.weights.load import (
    CheckpointError,
    load_decoder,
    load_model,
    read_spec,
    reload_parameters,
)
from treadle.tools.tiny_model import VOCAB_SIZE, main, make_folder, make_gguf

CPU = torch.device("cpu")


def load(path: Path, load_format: str = "auto", **options: Any) -> Decoder:
    spec = read_spec(path)
    return load_decoder(
        path, spec, load_format=load_format, dtype=torch.float32, device=CPU, **options
    )


def test_dummy_needs_only_a_config(tmp_path: Path, make_runner: Any) -> None:
    folder = make_folder(tmp_path, "qwen3", overrides={"attention_bias": True})
    (folder / "model.safetensors").unlink()
    first, again, other = (load(folder, "dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    assert not torch.equal(first.head.weight, first.embedding)
    [logits] = make_runner(first).step([list(range(20))])
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_progress_counts_bytes_to_the_total(load_format: str, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = make_folder(tmp_path, "qwen2")
    decoder = load(folder, load_format, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert {total for _, total in calls} == {done[-1]}
    assert done[-1] > decoder.embedding.nbytes + decoder.head.weight.nbytes


def test_format_must_match_the_path(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    file = make_gguf(folder, tmp_path / "tiny.gguf")
    assert load(folder, "safetensors").spec.vocab_size == load(file, "gguf").spec.vocab_size
    with pytest.raises(CheckpointError, match="cannot be loaded as gguf: it holds safetensors"):
        load(folder, "gguf")
    with pytest.raises(CheckpointError, match="cannot be loaded as safetensors: it holds gguf"):
        load(file, "safetensors")
    with pytest.raises(CheckpointError, match="'pt' is not supported; known: auto, safetensors"):
        load(folder, "pt")


@pytest.mark.skipif(not HostArena.can_release, reason="only Linux takes memory back")
@pytest.mark.parametrize("load_format", ["safetensors", "gguf", "dummy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_released_weights_are_reloaded_in_place(
    load_format: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make_folder(tmp_path, "qwen2")
    if load_format == "gguf":
        path = make_gguf(path, tmp_path / "tiny.gguf")
    spec, arena = read_spec(path), HostArena()
    loaded = load_model(
        path,
        spec,
        load_format=load_format,
        dtype=dtype,
        allocate=partial(arena.empty, "weights"),
        seed=7,
    )
    parameters = loaded.parameters
    assert arena.allocated_bytes("weights") >= sum(x.nbytes for x in parameters.values())
    assert loaded.decoder.embedding is parameters["embedding"]
    before = {name: (x.data_ptr(), x.clone()) for name, x in parameters.items()}
    arena.release("weights")
    arena.resume("weights")
    assert not any(x.any() for x in parameters.values())
    reload_parameters(parameters, path, spec, load_format=load_format, seed=7)
    for name, tensor in parameters.items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1]), name


def test_reload_refuses_another_models_checkpoint(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a")
    spec = read_spec(folder)
    loaded = load_model(
        folder,
        spec,
        load_format="auto",
        dtype=torch.float32,
        allocate=partial(HostArena().empty, "weights"),
    )
    other = make_folder(tmp_path / "b", overrides={"intermediate_size": spec.intermediate_size * 2})
    with pytest.raises(CheckpointError, match="does not fit the config"):
        reload_parameters(loaded.parameters, other, spec, load_format="auto")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "expected an object, found list"),
        ("{}", "architecture none named is not supported; known: LlamaForCausalLM"),
        ('{"architectures": ["BertModel"]}', "BertModel is not supported"),
        ('{"architectures": "LlamaForCausalLM"}', "architectures: expected a list of strings"),
        ('{"model_type": "llama"}', "num_attention_heads: expected a whole number"),
    ],
)
def test_unusable_config_names_the_file(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_spec(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: No such file"):
        read_spec(tmp_path / "nowhere")


def test_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match="quantization_config: gptq weights are not supported"
    ):
        read_spec(folder)


def test_tiny_model_command_writes_a_whole_model(tmp_path: Path) -> None:
    arguments = ["--arch", "mistral", "--shards", "2", "--gguf", "Q8_0"]
    assert main([str(tmp_path), *arguments, "--config", '{"sliding_window": 5}']) == 0
    assert read_spec(tmp_path).windows == read_spec(tmp_path / "model.gguf").windows == (5, 5, 5)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "MistralForCausalLM"
    ]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    text = "the treadle — ein Straßenfest, 日本語 🙂\n\t"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
