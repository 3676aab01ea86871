"""Which reader a path gets, and what a file that cannot be read becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.engine.errors import ModelError
from treadle.tools.tiny_model import make_folder, make_gguf
from treadle.tools.tokenizer_source import load_tokenizer

TEXT = "The quick brown fox isn't 12345"


def test_folder_and_gguf_of_one_model_agree(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    path = make_gguf(folder, tmp_path / "tiny.gguf", "Q8_0")
    ours, theirs = load_tokenizer(folder), load_tokenizer(path)
    assert ours.encode([TEXT], True) == theirs.encode([TEXT], True)
    assert ours.eos_token_ids <= theirs.eos_token_ids
    assert ours.has_chat_template and theirs.has_chat_template


@pytest.mark.parametrize("is_model", [False, True])
def test_file_that_is_no_gguf_is_a_model_error(tmp_path: Path, is_model: bool) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ModelError, match=r"broken\.gguf is not a GGUF file"):
        if is_model:
            load_tokenizer(make_folder(tmp_path), model_path=broken)
        else:
            load_tokenizer(broken)
    with pytest.raises(ModelError, match="cannot read"):
        load_tokenizer(tmp_path / "absent.gguf")
