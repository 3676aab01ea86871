"""What a user means by a model: files, folders, cached hub names, and errors that help."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest

from treadle.engine.errors import ModelError
from treadle.tools import model_source
from treadle.tools.model_source import ModelSource, locate, resolve_model


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""

    def refuse(*args: object) -> NoReturn:
        raise AssertionError("went to the network")

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return folder


def touch(path: Path, content: bytes = b"GGUF....") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def cached(hub_cache: Path, name: str) -> Path:
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    touch(repository / "refs" / "main", commit.encode())
    return repository / "snapshots" / commit


def test_gguf_file_is_itself_and_served_under_its_name(tmp_path: Path) -> None:
    path = touch(tmp_path / "m.gguf")
    assert resolve_model(str(path)) == ModelSource(path, "gguf", str(path))
    unnamed = touch(tmp_path / "blob")
    assert resolve_model(str(unnamed)).kind == "gguf"


@pytest.mark.parametrize(
    ("files", "kind", "chosen"),
    [
        (["config.json", "model.safetensors"], "folder", ""),
        (["config.json"], "folder", ""),
        (["m.gguf"], "gguf", "m.gguf"),
        (["m.gguf", "config.json"], "gguf", "m.gguf"),
        (["m.gguf", "config.json", "model.safetensors"], "folder", ""),
    ],
)
def test_folder_is_taken_for_what_it_holds(
    tmp_path: Path, files: list[str], kind: str, chosen: str
) -> None:
    for file in files:
        touch(tmp_path / "model" / file)
    name = str(tmp_path / "model") + "/"
    source = resolve_model(name)
    assert (source.path, source.kind) == (tmp_path / "model" / chosen, kind)
    assert source.served_name == name


def test_relative_and_home_paths_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "models" / "tiny" / "config.json")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("models/tiny").kind == "folder"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/models/tiny").path == tmp_path / "models" / "tiny"


def test_hub_name_is_found_in_the_local_cache(hub_cache: Path) -> None:
    snapshot = cached(hub_cache, "some-org/tiny")
    touch(snapshot / "config.json")
    assert resolve_model("some-org/tiny") == ModelSource(snapshot, "folder", "some-org/tiny")


def test_hub_name_of_a_gguf_repository_is_found(hub_cache: Path) -> None:
    snapshot = cached(hub_cache, "some-org/tiny-GGUF")
    touch(snapshot / "tiny.gguf")
    assert resolve_model("some-org/tiny-GGUF").path == snapshot / "tiny.gguf"


def test_folder_with_a_tokenizer_only_can_be_located(tmp_path: Path) -> None:
    touch(tmp_path / "tok" / "tokenizer.json")
    assert locate(str(tmp_path / "tok")) == tmp_path / "tok"
    with pytest.raises(ModelError, match="neither config.json nor"):
        resolve_model(str(tmp_path / "tok"))


def test_no_name_means_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = touch(tmp_path / "embedded.gguf")
    monkeypatch.setattr(model_source, "ensure_embedded_model", lambda progress: path)
    assert resolve_model(None) == ModelSource(path, "gguf", "smollm2-135m-instruct")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("some-org/absent", r"no such model in the local hub cache .*hf download some-org/absent"),
        ("absent", "no such model in the local hub cache"),
        ("not a name/at all", "no such model in the local hub cache"),
        ("/no/such/path", r"no file or folder /no/such/path; give a \.gguf file"),
        ("a/b/c", "no file or folder a/b/c"),
        ("./absent", "no file or folder absent"),
        ("", "name is empty"),
        ("  ", "name is empty"),
    ],
)
def test_unknown_name_says_what_was_tried_and_what_would_work(name: str, pattern: str) -> None:
    with pytest.raises(ModelError, match=pattern) as told:
        resolve_model(name)
    assert "embedded model" in str(told.value)


def test_folder_with_several_gguf_files_lists_them(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        touch(tmp_path / name)
    with pytest.raises(ModelError, match=r"several GGUF files, name one of them: a.gguf, b.gguf"):
        resolve_model(str(tmp_path))


def test_file_of_another_kind_is_refused_with_a_hint(tmp_path: Path) -> None:
    weights = touch(tmp_path / "model" / "model.safetensors", b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match=f"give its folder {weights.parent}"):
        resolve_model(str(weights))
    with pytest.raises(ModelError, match="is not a GGUF file"):
        resolve_model(str(touch(tmp_path / "empty.gguf", b"")))
