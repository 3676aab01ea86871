"""The tokenizer of a checkpoint, through Hugging Face's `tokenizers`. Knows no request, no device.

Reads a Hugging Face folder, or the metadata of a GGUF file; transformers is loaded only for folders
without a tokenizer.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from treadle.engine.chat_template import ChatTemplate, select_template
from treadle.engine.errors import InvalidRequest, ModelError
from treadle.engine.gguf_vocab import Metadata, read_gguf_vocab, surround
from treadle.engine.token_bytes import TokenBytes

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                  "mask_token")  # fmt: skip
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SLOW_FILES = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")


class HfTokenizer:
    """A `treadle.engine.tokenizer.Tokenizer` over a backend of the tokenizers library.

    templates: chat templates by name.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: frozenset[int],
        bos_token_id: int | None,
        templates: Mapping[str, ChatTemplate],
    ) -> None:
        # The engine encodes several requests at once in its own threads. Setting it at all also
        # keeps the library from warning when the host program forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._bos_token_id = bos_token_id
        self._templates = templates
        self._vocab_size = _vocab_size(backend, added)
        self._eos_token_ids = eos_token_ids
        self._special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes = TokenBytes(backend, added, self._vocab_size)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_token_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """[thread] One list of ids per text; the GIL is free meanwhile.

        A text that already begins with the beginning-of-text token does not get a second one.
        Raises: InvalidRequest for text that no UTF-8 can hold.
        """
        try:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError:
            raise InvalidRequest(
                "the text holds half a surrogate pair, which is no character"
            ) from None
        batch = [encoding.ids for encoding in encodings]
        if add_special_tokens and (bos := self._bos_token_id) is not None:
            batch = [ids[1:] if ids[:2] == [bos, bos] else ids for ids in batch]
        return batch

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """[thread] The prompt text of a chat; already holds its special tokens.

        Raises: InvalidRequest with the template's own message when the template refuses.
        """
        return select_template(self._templates, bool(tools)).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to a text that it continues."""
        return self._bytes[token_id]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, as the library reads it."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _vocab_size(backend: Backend, added: Mapping[int, AddedToken]) -> int:
    size = max(backend.get_vocab_size(), max(added, default=-1) + 1)
    while backend.id_to_token(size) is not None:  # ids with holes below
        size += 1
    return size


def gguf_tokenizer(
    metadata: Metadata, origin: str, eos_token_ids: frozenset[int] = frozenset()
) -> HfTokenizer:
    """The tokenizer in a GGUF file's keys and values.

    origin: the file, for messages. eos_token_ids: more ids that end a text.
    Raises: ModelError when there is none or it cannot be used.
    """
    vocab = read_gguf_vocab(metadata, origin)
    return HfTokenizer(
        vocab.tokenizer,
        eos_token_ids=eos_token_ids | vocab.eos_token_ids,
        bos_token_id=vocab.bos_token_id,
        templates=_compile(vocab.chat_templates, vocab.special_tokens, origin),
    )


def folder_tokenizer(folder: Path, eos_token_ids: frozenset[int] = frozenset()) -> HfTokenizer:
    """The tokenizer in a Hugging Face folder.

    eos_token_ids: more ids that end a text.
    Raises: ModelError when there is none or it cannot be read.
    """
    config = _read_json(folder / "tokenizer_config.json")
    backend = _load_backend(folder)
    special = _special_tokens(config, _read_json(folder / "special_tokens_map.json"))
    _add_tokens(backend, config, special.values())
    bos = backend.token_to_id(special.get("bos_token", ""))
    eos = backend.token_to_id(special.get("eos_token", ""))
    if "add_bos_token" in config or "add_eos_token" in config:  # these decide, where given
        backend.post_processor = surround(
            bos if config.get("add_bos_token") else None,
            eos if config.get("add_eos_token") else None,
        )
    return HfTokenizer(
        backend,
        eos_token_ids=eos_token_ids | folder_eos_ids(folder) | (set() if eos is None else {eos}),
        bos_token_id=bos,
        templates=_compile(_read_templates(folder, config), special, str(folder)),
    )


def _load_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return Backend.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise ModelError(f"cannot read {file}: {error}") from error
    if not any((folder / name).is_file() for name in _SLOW_FILES):
        raise ModelError(
            f"{folder} holds no tokenizer: looked for tokenizer.json, {', '.join(_SLOW_FILES)}; "
            "name another folder or GGUF file with --tokenizer-path"
        )
    try:
        from transformers import AutoTokenizer

        backend: Backend = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        ).backend_tokenizer
        return backend
    except Exception as error:  # whatever a conversion lacks, it is about this folder
        raise ModelError(f"cannot convert the tokenizer in {folder}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold an object")
    return value


def folder_eos_ids(folder: Path) -> frozenset[int]:
    """What the configs of a model's folder say ends a text. Raises: ModelError."""
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    ids: set[int] = set()
    for source in (config, config.get("text_config") or {}, generation):
        value = source.get("eos_token_id")
        ids.update(i for i in (value if isinstance(value, list) else [value]) if i is not None)
    return frozenset(ids)


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; an entry is a string or an object with `content`."""
    found: dict[str, str] = {}
    for config in reversed(configs):
        for name in _SPECIAL_NAMES:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _add_tokens(backend: Backend, config: Mapping[str, Any], special: Iterable[str]) -> None:
    """Tokens that only tokenizer_config.json knows, and the special ones as such."""
    known = backend.get_added_tokens_decoder()
    listed = {int(key): entry for key, entry in config.get("added_tokens_decoder", {}).items()}
    backend.add_tokens(
        [
            AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in _TOKEN_FLAGS})
            for token_id, entry in sorted(listed.items())
            if token_id not in known
        ]
    )
    is_special = {token.content for token in known.values() if token.special}
    backend.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True)
            for text in special
            if text not in is_special and backend.token_to_id(text) is not None
        ]
    )


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, from whichever of their places the folder uses."""
    found: dict[str, str] = {}
    listed = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(listed, str):
        found["default"] = listed
    elif listed:
        found = {entry["name"]: entry["template"] for entry in listed}
    files = {"default": folder / "chat_template.jinja"} | {
        file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    return found | {
        name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()
    }


def _compile(
    sources: Mapping[str, str], special: Mapping[str, str], origin: str
) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(text, special, origin) for name, text in sources.items()}
