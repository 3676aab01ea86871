"""Reads safetensors checkpoints, memory-mapped: one file, or shards named by an index.

Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from treadle.graphs.models.adapters.base import Placement
from treadle.graphs.models.parameters import Shape
from treadle.graphs.weights.errors import CheckpointError
from treadle.graphs.weights.parts import Part

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsSource:
    """The safetensors files of a Hugging Face folder.

    Raises: CheckpointError when there are none, one is missing, truncated or corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._shapes: dict[str, Shape] = {}
        for path in _find_files(folder):
            self._open(path)

    @property
    def label(self) -> str:
        return str(self._folder)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def name_of(self, placement: Placement) -> str:
        return placement.name

    def dtype_of(self, name: str) -> str | None:
        """float32, float16 or bfloat16; None for another type or an unknown tensor."""
        if name not in self._files:
            return None
        return _DTYPES.get(self._files[name].get_slice(name).get_dtype())

    def read(self, part: Part, destination: Tensor) -> None:
        name = part.whole.name
        if self.dtype_of(name) is None:
            stored = self._files[name].get_slice(name).get_dtype()
            raise CheckpointError(
                f"{self.label}: tensor {name} is stored as {stored}, which is not supported; "
                f"known: {', '.join(_DTYPES)}"
            )
        box = tuple(slice(kept.start, kept.stop) for kept in part.box)
        destination.copy_(self._files[name].get_slice(name)[box])

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():
                self._files[name] = file
                self._shapes[name] = tuple(file.get_slice(name).get_shape())
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is truncated or corrupt: {error}") from error


def _find_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        return [folder / name for name in _shards(folder / _INDEX)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    others = sorted(folder.glob("*.safetensors"))
    if others:
        return others
    if any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} has only PyTorch .bin weights, which may run code when loaded; "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{folder} has no weights: looked for {_INDEX}, {_SINGLE}, *.safetensors")


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of shards") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names a shard outside its folder: {name!r}")
    return names
