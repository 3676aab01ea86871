"""A path -> a tokenizer. Knows which reader fits a folder or a file, and no vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.engine.errors import ModelError
from treadle.engine.gguf_vocab import gguf_eos_ids
from treadle.engine.hf_tokenizer import (
    HfTokenizer,
    folder_eos_ids,
    folder_tokenizer,
    gguf_tokenizer,
)
from treadle.graphs.weights.errors import CheckpointError
from treadle.graphs.weights.gguf_file import read_metadata


def load_tokenizer(path: Path, *, model_path: Path | None = None) -> HfTokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file.

    model_path: the checkpoint, if it is not `path`: it says more ids that end a text.
    Raises: ModelError when there is none or it cannot be read.
    """
    eos_ids = frozenset[int]() if model_path in (None, path) else _eos_ids(model_path)
    if path.is_dir():
        return folder_tokenizer(path, eos_ids)
    return gguf_tokenizer(_gguf_metadata(path), str(path), eos_ids)


def _eos_ids(model_path: Path) -> frozenset[int]:
    if model_path.is_dir():
        return folder_eos_ids(model_path)
    return gguf_eos_ids(_gguf_metadata(model_path))


def _gguf_metadata(path: Path) -> dict[str, Any]:
    try:
        return read_metadata(path)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
