"""Hugging Face folders: same ids and text as transformers, special tokens, ends, templates."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from treadle.engine.detokenizer import IncrementalDetokenizer
from treadle.engine.errors import InvalidRequest, ModelError
from treadle.tools.tokenizer_source import load_tokenizer

ALPHABET = "abc ABC\n\t123é你好😀.,<>|_'\u0301"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
USER = [{"role": "user", "content": "hi"}]

MakeFolder = Callable[..., Path]


def train(byte_level: bool = True) -> Backend:
    texts = ["".join(random.choices(ALPHABET, k=60)) for _ in range(60)]
    if byte_level:
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
        alphabet = list("abcABC123.,▁")
    special = ["<s>", "</s>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + 60,
        special_tokens=special,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if byte_level:
        return backend
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # byte tokens are ordinary ones
    return Backend.from_str(json.dumps(state))


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """make_folder(backend, name.json={...}, name=text) writes a folder; settings have defaults."""

    def make(backend: Backend | None = None, **files: Any) -> Path:
        folder = tmp_path / f"model-{random.random()}"
        folder.mkdir()
        if backend is not None:
            backend.save(str(folder / "tokenizer.json"))
        files.setdefault("tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    return make


@pytest.mark.parametrize("byte_level", [True, False], ids=["byte-level", "sentencepiece"])
def test_ids_and_text_equal_transformers(make_folder: MakeFolder, byte_level: bool) -> None:
    from transformers import AutoTokenizer

    folder = make_folder(
        train(byte_level),
        **{
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": {"__type": "AddedToken", "content": "</s>"},
            }
        },
    )
    other = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer = load_tokenizer(folder)
    texts = ["".join(random.choices(ALPHABET, k=random.randint(0, 40))) for _ in range(200)]
    texts += ["<s>a</s>", "", " "]
    batch = tokenizer.encode(texts, add_special_tokens=False)
    for text, ids in zip(texts, batch, strict=True):
        assert ids == other.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == other.decode(ids, skip_special_tokens=skip)
    assert tokenizer.vocab_size == len(other)
    assert tokenizer.special_token_ids >= set(other.all_special_ids)


@pytest.mark.parametrize("byte_level", [True, False], ids=["byte-level", "sentencepiece"])
def test_bytes_of_tokens_make_the_librarys_text(make_folder: MakeFolder, byte_level: bool) -> None:
    tokenizer = load_tokenizer(make_folder(train(byte_level)))
    for _ in range(100):
        text = "".join(random.choices(ALPHABET, k=30)).lstrip()
        ids = tokenizer.encode(["." + text], add_special_tokens=False)[0]
        stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        out = "".join(stream.push([i]) for i in ids) + stream.finish()
        assert out.removeprefix(" ") == tokenizer.decode(ids, False) == "." + text


def test_unusual_decoder_is_asked_for_what_a_token_adds(make_folder: MakeFolder) -> None:
    vocab = {"[UNK]": 0, "un": 1, "##able": 2, "hello": 3, "7": 4}
    words = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    tokenizer = load_tokenizer(make_folder(words))
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3)] == [b" un", b"able", b" hello"]
    plain = load_tokenizer(make_folder(Backend(models.WordLevel(vocab=vocab, unk_token="[UNK]"))))
    assert plain.token_bytes(4) == b" 7"


def test_ids_without_a_meaning_have_no_bytes(make_folder: MakeFolder) -> None:
    tokenizer = load_tokenizer(make_folder(train()))
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1)
    for token_id in (tokenizer.vocab_size, 10**9, 2**40, -1):
        assert tokenizer.token_bytes(token_id) == b""


def test_bos_is_never_doubled(make_folder: MakeFolder) -> None:
    backend = train()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = load_tokenizer(make_folder(backend))
    plain = tokenizer.encode(["a"], add_special_tokens=False)[0]
    batch = tokenizer.encode(["a", "<s>a", "a<s>"], add_special_tokens=True)
    assert batch == [[0, *plain], [0, *plain], [0, *plain, 0]]
    assert tokenizer.encode(["<s>a"], add_special_tokens=False) == [[0, *plain]]


@pytest.mark.parametrize(("bos", "eos"), [(True, True), (True, False), (False, False)])
def test_add_bos_and_eos_in_the_config_decide(
    make_folder: MakeFolder, bos: bool, eos: bool
) -> None:
    backend = train()
    backend.post_processor = processors.TemplateProcessing(
        single="</s> $A <s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": bos, "add_eos_token": eos}
    tokenizer = load_tokenizer(make_folder(backend, **{"tokenizer_config.json": config}))
    plain = tokenizer.encode(["ab"], add_special_tokens=False)[0]
    expected = [0] * bos + plain + [1] * eos
    assert tokenizer.encode(["ab"], add_special_tokens=True) == [expected]


def test_ends_come_from_every_config(make_folder: MakeFolder) -> None:
    files = {
        "config.json": {"eos_token_id": 7, "text_config": {"eos_token_id": [8]}},
        "generation_config.json": {"eos_token_id": [9, 10]},
    }
    folder = make_folder(train(), **files)
    assert load_tokenizer(folder).eos_token_ids == {1, 7, 8, 9, 10}
    bare = make_folder(train(), **{"config.json": {"eos_token_id": None}})
    assert load_tokenizer(bare).eos_token_ids == {1}
    assert load_tokenizer(bare, model_path=folder).eos_token_ids == {1, 7, 8, 9, 10}


def test_ends_of_a_gguf_model_hold_for_a_tokenizer_from_elsewhere(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a", "b", "c"])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_tokenizer(make_folder(train()), model_path=path).eos_token_ids == {1, 2}


def test_tokens_that_only_the_config_knows_are_added(make_folder: MakeFolder) -> None:
    backend = train()
    size = backend.get_vocab_size()
    entry = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(size + 1): entry | {"content": "<think>", "special": False},
            str(size): entry | {"content": "<|im_end|>", "special": True},
            "0": entry | {"content": "<s>", "special": True},
        },
    }
    tokenizer = load_tokenizer(make_folder(backend, **{"tokenizer_config.json": config}))
    ids = tokenizer.encode(["<think><|im_end|>"], add_special_tokens=False)[0]
    assert ids == [size + 1, size]
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.eos_token_ids == {size}
    assert size in tokenizer.special_token_ids and size + 1 not in tokenizer.special_token_ids
    assert tokenizer.decode(ids) == "<think>"


def test_truncation_and_padding_in_the_file_do_not_count(make_folder: MakeFolder) -> None:
    backend = train()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    tokenizer = load_tokenizer(make_folder(backend))
    lengths = [len(ids) for ids in tokenizer.encode(["abcabc123..,,", "a"], False)]
    assert lengths[0] > 3 and lengths[1] == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": TEMPLATE, "bos_token": "<s>"}}, "<s>user:hi;"),
        ({"chat_template.jinja": "file {{ messages[0].content }}"}, "file hi"),
        ({"chat_template.json": {"chat_template": "json {{ messages[0].content }}"}}, "json hi"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "listed"},
                    ]
                }
            },
            "listed",
        ),
        (
            {
                "tokenizer_config.json": {"chat_template": "old"},
                "chat_template.jinja": "new",
                "additional_chat_templates/rag.jinja": "rag",
            },
            "new",
        ),
    ],
    ids=["config", "jinja", "json", "list", "newest"],
)
def test_chat_template_is_found_wherever_it_lies(
    make_folder: MakeFolder, files: dict[str, Any], expected: str
) -> None:
    tokenizer = load_tokenizer(make_folder(train(), **files))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == expected


def test_tools_choose_the_template_for_tools(make_folder: MakeFolder) -> None:
    files = {
        "chat_template.jinja": "plain",
        "additional_chat_templates/tool_use.jinja": "with tools",
    }
    tokenizer = load_tokenizer(make_folder(train(), **files))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.render_chat(USER, add_generation_prompt=True, tools=tools) == "with tools"
    assert tokenizer.render_chat(USER, add_generation_prompt=True, tools=[]) == "plain"


def test_chat_without_a_template_is_a_bad_request(make_folder: MakeFolder) -> None:
    tokenizer = load_tokenizer(make_folder(train()))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat(USER, add_generation_prompt=True)


def test_half_a_surrogate_pair_is_a_bad_request(make_folder: MakeFolder) -> None:
    tokenizer = load_tokenizer(make_folder(train()))
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode(["fine", "bad \ud800"], add_special_tokens=True)
    assert tokenizer.encode([], add_special_tokens=True) == []


def test_missing_or_broken_tokenizer_names_the_files(make_folder: MakeFolder) -> None:
    empty = make_folder()
    with pytest.raises(ModelError, match=r"holds no tokenizer: looked for tokenizer.json") as told:
        load_tokenizer(empty)
    assert str(empty) in str(told.value) and "tokenizer.model" in str(told.value)
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer.json"):
        load_tokenizer(make_folder(**{"tokenizer.json": "{}"}))
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer_config.json"):
        load_tokenizer(make_folder(train(), **{"tokenizer_config.json": "{"}))
    with pytest.raises(ModelError, match="cannot convert the tokenizer"):
        load_tokenizer(make_folder(**{"tokenizer.model": "no protobuf"}))


def test_folder_without_tokenizer_json_goes_through_transformers(make_folder: MakeFolder) -> None:
    backend = train()
    model = json.loads(backend.to_str())["model"]
    merges = "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"])
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>"}
    folder = make_folder(
        **{"vocab.json": model["vocab"], "merges.txt": merges, "tokenizer_config.json": config}
    )
    tokenizer = load_tokenizer(folder)
    for text in ("abc 123", "é你好😀 x"):
        ids = tokenizer.encode([text], False)[0]
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == {1}


def test_loading_a_tokenizer_never_loads_torch(make_folder: MakeFolder) -> None:
    folder = make_folder(train(), **{"chat_template.jinja": "x"})
    code = (
        "import sys, pathlib, treadle.tools.tokenizer_source as h; "
        f"h.load_tokenizer(pathlib.Path({str(folder)!r})).encode(['a b'], True); "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
