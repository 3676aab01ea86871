"""`/v1/completions` against a fake engine, over real sockets."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from fake_served import BOS, EOS, MODEL, reply, reply_text
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from treadle.engine.chat_template import ChatTemplate
from treadle.engine.hf_tokenizer import HfTokenizer
from treadle.http.state import ApiSettings

if TYPE_CHECKING:
    from tests.http.conftest import Serve, Served

PATH = "/v1/completions"


def ids_of(text: str) -> list[int]:
    return [BOS, *text.encode()]


def some_ids() -> list[int]:
    return [random.randrange(97, 122) for _ in range(random.randrange(1, 20))]


def tokenizer_with_bos() -> HfTokenizer:
    """A letter a token; `<s>` is added in front of a text, and written by the chat template."""
    backend = Backend(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2}, merges=[]))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 0)]
    )
    template = ChatTemplate("<s>{{ messages[0].content }}", {}, "test")
    return HfTokenizer(
        backend, eos_token_ids=frozenset(), bos_token_id=0, templates={"default": template}
    )


async def test_answer_has_every_field(served: Served) -> None:
    status, answer = await served.post(PATH, {"prompt": "abc", "max_tokens": 3})
    assert status == 200
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["choices"] == [
        {
            "index": 0,
            "text": reply_text(ids_of("abc"), limit=3),
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 3


async def test_length_is_sixteen_by_default(served: Served) -> None:
    await served.post(PATH, {"prompt": "abc"})
    await served.post(PATH, {"prompt": "abc", "max_tokens": None})
    assert [each.params.max_new_tokens for each in served.engine.submitted] == [16, 16]


async def test_ids_are_taken_as_they_are(served: Served) -> None:
    ids = some_ids()
    await served.post(PATH, {"prompt": ids})
    assert served.engine.submitted[0].ids == ids


@pytest.mark.parametrize(("path", "key"), [(PATH, "prompt"), ("/generate", "text")])
async def test_text_that_begins_with_bos_gets_no_second_one(
    served: Served, path: str, key: str
) -> None:
    served.engine.tokenizer = tokenizer_with_bos()
    body = {key: ["<s>ab", "ab", "<s><s>ab", "a<s>"]}
    assert (await served.post(path, body))[0] == 200
    assert [each.ids for each in served.engine.submitted] == [
        [0, 1, 2], [0, 1, 2], [0, 0, 1, 2], [0, 1, 0],
    ]  # fmt: skip


async def test_chat_prompt_has_the_bos_of_its_template_only(served: Served) -> None:
    served.engine.tokenizer = tokenizer_with_bos()
    body = {"messages": [{"role": "user", "content": "ab"}]}
    assert (await served.post("/v1/chat/completions", body))[0] == 200
    assert served.engine.submitted[0].ids == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["texts", "ids"])
async def test_batch_is_ordered_prompt_by_prompt(served: Served, kind: str, n: int) -> None:
    prompts: list[Any] = [some_ids() for _ in range(3)]
    ids = prompts
    if kind == "texts":
        prompts = [bytes(each).decode() for each in prompts]
        ids = [ids_of(text) for text in prompts]
    status, answer = await served.post(PATH, {"prompt": prompts, "n": n})
    assert status == 200
    assert [c["index"] for c in answer["choices"]] == list(range(3 * n))
    expected = [reply_text(each, i) for each in ids for i in range(n)]
    assert [c["text"] for c in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    tokens = sum(len(reply(each, i)) for each in ids for i in range(n))
    assert answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("echo", [False, True])
async def test_stream_equals_answer(served: Served, echo: bool) -> None:
    prompts = [some_ids() for _ in range(3)]
    body = {"prompt": prompts, "n": 2, "echo": echo}
    events = await served.events(PATH, {**body, "stream_options": {"include_usage": True}})
    _, answer = await served.post(PATH, body)
    texts, finishes = [""] * 6, [""] * 6
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            finishes[choice["index"]] += choice["finish_reason"] or ""
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert finishes == ["stop"] * 6
    assert events[-1]["usage"] == answer["usage"]
    assert {choice["matched_stop"] for choice in answer["choices"]} == {EOS}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc déf", [97, 98, 99]])
async def test_echo_without_new_tokens_is_the_prompt(
    served: Served, prompt: Any, stream: bool
) -> None:
    body = {"prompt": prompt, "echo": True, "max_tokens": 0}
    if stream:
        choices = [event["choices"][0] for event in await served.events(PATH, body)]
        text = "".join(choice["text"] for choice in choices)
        finish = choices[-1]["finish_reason"]
    else:
        _, answer = await served.post(PATH, body)
        text, finish = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] == 0
    assert text == (prompt if isinstance(prompt, str) else "abc")
    assert finish == "length"


async def test_cached_tokens_of_a_batch_are_counted_once_a_prompt(serve: Serve) -> None:
    served = await serve(ApiSettings(enable_cache_report=True))
    served.engine.num_cached = 2
    _, answer = await served.post(PATH, {"prompt": [[97], [97] * 9, [98] * 2], "n": 2})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0 + 2 + 1}
    plain = await serve()
    _, answer = await plain.post(PATH, {"prompt": "abc"})
    assert answer["usage"]["prompt_tokens_details"] is None


async def test_rid_of_a_batch_names_its_requests(served: Served) -> None:
    await served.post(PATH, {"prompt": ["a", "b"], "rid": "mine"})
    await served.post(PATH, {"prompt": ["a", "b"], "rid": ["x", "y"]})
    assert [s.request_id for s in served.engine.submitted] == ["mine_0", "mine_1", "x", "y"]


async def test_bad_prompt_of_a_batch_ends_the_others(served: Served) -> None:
    status, answer = await served.post(PATH, {"prompt": [[97], [98], [5000]]})
    assert status == 400
    assert answer["error"]["param"] == "prompt"
    assert sorted(served.engine.aborted) == sorted(
        each.request_id for each in served.engine.submitted
    )


async def test_folded_answer_asks_for_few_deltas(served: Served) -> None:
    await served.post(PATH, {"prompt": "a"})
    await served.events(PATH, {"prompt": "a"})
    await served.post(PATH, {"prompt": "a", "stream_interval": 2})
    intervals = [each.params.stream_interval for each in served.engine.submitted]
    assert (intervals[0] or 0) > 16
    assert intervals[1:] == [None, 2]
