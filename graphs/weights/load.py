"""A path -> a spec, and a path with a spec -> a decoder with its weights.

Knows formats by name; never a request, a tokenizer or a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from treadle.graphs.models.adapters.registry import find_adapter
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.hf_config import HfConfig
from treadle.graphs.models.parameters import Shape, parameter_shapes
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import SINGLE, TensorParallel, local_spec
from treadle.graphs.weights.dummy import fill_randomly
from treadle.graphs.weights.errors import CheckpointError
from treadle.graphs.weights.gguf_file import read_gguf
from treadle.graphs.weights.gguf_source import GgufSource
from treadle.graphs.weights.gguf_spec import gguf_spec
from treadle.graphs.weights.parts import rank_parts
from treadle.graphs.weights.safetensors_source import SafetensorsSource
from treadle.graphs.weights.source import Progress, TensorSource, fill_parameters

__all__ = [
    "LOAD_FORMATS",
    "CheckpointError",
    "Loaded",
    "load_decoder",
    "load_model",
    "read_spec",
    "reload_parameters",
]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

Allocate = Callable[[Shape, torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A decoder beside the tensors that it computes with."""

    decoder: Decoder
    parameters: Mapping[str, Tensor]


def read_spec(path: Path) -> DecoderSpec:
    """Describes the model in a .gguf file or a Hugging Face folder.

    Raises: CheckpointError naming the file and what in it cannot be used.
    """
    if path.is_file():
        try:
            return gguf_spec(read_gguf(path))
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
    config = _read_config(path / "config.json")
    try:
        architectures = config.texts("architectures") or ()
        adapter = find_adapter(architectures, config.text("model_type", ""))
        if config.get("quantization_config"):
            method = config.section("quantization_config").get("quant_method")
            raise ValueError(f"quantization_config: {method} weights are not supported yet")
        spec = adapter.spec(config)
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    if config.get("dtype") is None and config.get("torch_dtype") is None:
        spec = replace(spec, dtype=_stored_dtype(path))
    return spec


def load_model(
    path: Path,
    spec: DecoderSpec,
    *,
    load_format: str,
    dtype: torch.dtype,
    allocate: Allocate,
    progress: Progress | None = None,
    seed: int = 0,
    parallel: TensorParallel = SINGLE,
) -> Loaded:
    """Makes a decoder with the checkpoint's weights, converted to dtype.

    spec: from `read_spec`, with another max_position where another context is served.
    load_format: one of LOAD_FORMATS; dummy reads no weights and draws random ones from the seed.
    allocate: makes the memory of each parameter; it is filled in place.
    progress: called with the bytes of parameters filled so far, and of all.
    parallel: the rank whose part is made and read; the spec is the whole model's all the same.
    Raises: CheckpointError when the checkpoint does not fit the spec or cannot be read; ValueError
        when so many ranks cannot share the model.
    """
    shapes = parameter_shapes(local_spec(spec, parallel))
    source = _open_source(path, spec, load_format)
    parameters = {name: allocate(shape, dtype) for name, shape in shapes.items()}
    _fill(parameters, spec, source, seed, progress, parallel)
    return Loaded(Decoder(spec, parameters, parallel), parameters)


def load_decoder(
    path: Path,
    spec: DecoderSpec,
    *,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    seed: int = 0,
) -> Decoder:
    """As `load_model`, with parameters in torch's own memory on the device."""
    allocate = partial(_empty, device)
    return load_model(
        path,
        spec,
        load_format=load_format,
        dtype=dtype,
        allocate=allocate,
        progress=progress,
        seed=seed,
    ).decoder


def reload_parameters(
    parameters: Mapping[str, Tensor],
    path: Path,
    spec: DecoderSpec,
    *,
    load_format: str,
    progress: Progress | None = None,
    seed: int = 0,
    parallel: TensorParallel = SINGLE,
) -> None:
    """Fills a loaded decoder's parameters again, in place; arguments as for `load_model`.

    Raises: CheckpointError; some parameters may have been filled by then.
    """
    _fill(parameters, spec, _open_source(path, spec, load_format), seed, progress, parallel)


def _fill(
    parameters: Mapping[str, Tensor],
    spec: DecoderSpec,
    source: TensorSource | None,
    seed: int,
    progress: Progress | None,
    parallel: TensorParallel,
) -> None:
    parts = rank_parts(spec, parallel)
    if source is None:
        fill_randomly(parameters, seed, progress, parts)
    else:
        fill_parameters(parameters, parts, source, progress)


def _open_source(path: Path, spec: DecoderSpec, load_format: str) -> TensorSource | None:
    """None for dummy, which reads nothing."""
    if load_format not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        raise CheckpointError(f"load format {load_format!r} is not supported; known: {known}")
    if load_format == "dummy":
        return None
    found = "gguf" if path.is_file() else "safetensors"
    if load_format not in ("auto", found):
        raise CheckpointError(f"{path} cannot be loaded as {load_format}: it holds {found}")
    if found == "gguf":
        return GgufSource(read_gguf(path), find_adapter([spec.architecture]).gguf_interleaves)
    return SafetensorsSource(path)


def _empty(device: torch.device, shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _read_config(path: Path) -> HfConfig:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(values).__name__}")
    return HfConfig(values)


def _stored_dtype(folder: Path) -> str:
    """The embedding's, where the config does not say; float32 for a folder without weights."""
    if not any(folder.glob("*.safetensors")):
        return "float32"
    return SafetensorsSource(folder).dtype_of("model.embed_tokens.weight") or "float32"
