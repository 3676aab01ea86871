"""`/v1/completions` against a fake engine, over real sockets."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from fake_served import BOS, EOS, MODEL, reply, reply_text

if TYPE_CHECKING:
    from tests.http.conftest import Served

PATH = "/v1/completions"


def ids_of(text: str) -> list[int]:
    return [BOS, *text.encode()]


def some_ids() -> list[int]:
    return [random.randrange(97, 122) for _ in range(random.randrange(1, 20))]


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
