"""Finds the checkpoint that a user means. Reads no weights, knows no engine.

A file, a folder, a name in the local hub cache, or nothing for the embedded model; it never goes
to the network for a name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treadle.engine.errors import ModelError
from treadle.tools.embedded_model import SMOLLM2, Progress, ensure_embedded_model

logger = logging.getLogger("treadle")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a checkpoint lies, and the name it is served under unless told otherwise."""

    path: Path  # a .gguf file or a Hugging Face folder
    kind: Literal["gguf", "folder"]
    served_name: str


def resolve_model(name: str | None, progress: Progress = logger.info) -> ModelSource:
    """name: a path, a hub name, or None for the embedded model, which may have to be downloaded.

    Raises: ModelError that says what was looked for and what would work.
    """
    if name is None:
        return ModelSource(ensure_embedded_model(progress), "gguf", SMOLLM2.served_name)
    path = locate(name)
    try:
        return _from_folder(path, name) if path.is_dir() else _from_file(path, name)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def locate(name: str) -> Path:
    """The file or folder that a path or a hub name means; a tokenizer may be named so, too.

    Raises: ModelError that says what was looked for and what would work.
    """
    path = Path(name).expanduser()
    if not name.strip():
        raise ModelError(f"the model's name is empty; {_WORKS}")
    if path.exists():
        return path
    if _is_hub_name(name):
        return _cached_snapshot(name)
    raise ModelError(f"there is no file or folder {path}; {_WORKS}")


_WORKS = (
    "give a .gguf file, a folder with config.json and safetensors, or a name in the local hub "
    "cache, or leave it out to serve the embedded model"
)


def _from_file(path: Path, name: str) -> ModelSource:
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if not is_gguf:
        hint = f"; give its folder {path.parent}" if path.suffix == ".safetensors" else ""
        raise ModelError(f"{path} is not a GGUF file{hint or '; ' + _WORKS}")
    return ModelSource(path, "gguf", name)


def _from_folder(folder: Path, name: str) -> ModelSource:
    """A Hugging Face folder, or one whose only checkpoint is a GGUF file."""
    files = sorted(folder.glob("*.gguf"))
    has_config = (folder / "config.json").is_file()
    if has_config and (not files or any(folder.glob("*.safetensors"))):
        return ModelSource(folder, "folder", name)
    if len(files) == 1:
        return ModelSource(files[0], "gguf", name)
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{folder} holds several GGUF files, name one of them: {names}")
    raise ModelError(f"{folder} holds neither config.json nor a .gguf file; {_WORKS}")


def _is_hub_name(name: str) -> bool:
    """Whether it reads as `model` or `owner/model`, not as a path."""
    return name.count("/") <= 1 and not name.startswith(("/", ".", "~")) and "\\" not in name


def _cached_snapshot(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"there is no file or folder {name}, and no such model in the local hub cache "
            f"({constants.HF_HUB_CACHE}); fetch it with `hf download {name}`, or {_WORKS}"
        ) from error
