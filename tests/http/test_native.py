"""`/generate` and `/abort_request` against a fake engine, over real sockets."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from fake_served import BOS, EOS, reply, reply_text

from treadle.engine.output import FinishReason
from treadle.http.state import ApiSettings

if TYPE_CHECKING:
    from tests.http.conftest import Serve, Served

PATH = "/generate"


def some_ids() -> list[int]:
    return [random.randrange(97, 122) for _ in range(random.randrange(1, 20))]


async def test_single_answer_is_an_object(served: Served) -> None:
    status, answer = await served.post(PATH, {"text": "abc", "rid": "r1", "model": 5})
    ids = [BOS, *b"abc"]
    assert status == 200
    assert answer["text"] == reply_text(ids)
    assert answer["output_ids"] == list(range(len(reply(ids, 0))))
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 4,
        "completion_tokens": len(reply(ids, 0)),
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "weight_version": "default",
        "num_retractions": 0,
        "dp_rank": None,
    }


async def test_id_is_32_hex_digits_by_default(served: Served) -> None:
    _, answer = await served.post(PATH, {"text": "abc"})
    assert len(answer["meta_info"]["id"]) == 32
    int(answer["meta_info"]["id"], 16)


async def test_put_works_as_post(served: Served) -> None:
    async with served.session.put(served.url + PATH, json={"input_ids": [97]}) as response:
        assert response.status == 200
        assert (await response.json())["text"] == reply_text([97])


async def test_batch_is_a_list_with_its_own_params(served: Served) -> None:
    batch = [some_ids(), some_ids()]
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}]
    _, answer = await served.post(PATH, {"input_ids": batch, "sampling_params": params})
    lengths = [each["meta_info"]["completion_tokens"] for each in answer]
    assert lengths == [1, 2, 2]
    expected = [reply_text(batch[0], 0, 1), *(reply_text(batch[1], i, 2) for i in range(2))]
    assert [each["text"] for each in answer] == expected
    assert answer[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


async def test_batch_of_one_is_still_a_list(served: Served) -> None:
    _, answer = await served.post(PATH, {"text": ["abc"]})
    assert [each["text"] for each in answer] == [reply_text([BOS, *b"abc"])]


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, 128), ({"max_new_tokens": None}, None), ({"max_new_tokens": 7}, 7)],
)
async def test_length_has_the_native_default(
    served: Served, params: dict[str, Any], expected: int | None
) -> None:
    await served.post(PATH, {"text": "a", "sampling_params": params})
    assert served.engine.submitted[0].params.max_new_tokens == expected


@pytest.mark.parametrize("incremental", [False, True])
async def test_stream_adds_up_to_the_answer(serve: Serve, incremental: bool) -> None:
    served = await serve(ApiSettings(incremental_streaming_output=incremental))
    body = {"input_ids": [some_ids(), some_ids()], "sampling_params": {"n": 2}}
    events = await served.events(PATH, body)
    _, answer = await served.post(PATH, body)
    texts: list[str] = [""] * 4
    ids: list[list[int]] = [[] for _ in range(4)]
    for event in events:
        index = event["index"]
        text, new = event["text"], event["output_ids"]
        texts[index] = texts[index] + text if incremental else text
        ids[index] = ids[index] + new if incremental else new
        assert len(ids[index]) == event["meta_info"]["completion_tokens"]
    assert texts == [each["text"] for each in answer]
    assert ids == [each["output_ids"] for each in answer]
    finishes = [e["meta_info"]["finish_reason"] for e in events]
    assert finishes.count({"type": "stop", "matched": EOS}) == 4
    assert finishes.count(None) == len(events) - 4
    assert all(("e2e_latency" in e["meta_info"]) == bool(e["meta_info"]["finish_reason"])
               for e in events)  # fmt: skip


async def test_cached_tokens_and_retractions_are_told(served: Served) -> None:
    served.engine.num_cached, served.engine.num_retractions = 2, 3
    _, answer = await served.post(PATH, {"text": "abcdef"})
    events = await served.events(PATH, {"text": "abcdef"})
    metas = [event["meta_info"] for event in events]
    assert answer["meta_info"]["cached_tokens"] == 2
    assert answer["meta_info"]["num_retractions"] == 3
    assert {meta["cached_tokens"] for meta in metas} == {2}
    assert [meta["num_retractions"] for meta in metas] == [0] + [3] * (len(metas) - 1)


async def test_single_stream_has_no_index(served: Served) -> None:
    events = await served.events(PATH, {"text": "abc"})
    assert all("index" not in event for event in events)
    assert events[-1]["text"] == reply_text([BOS, *b"abc"])


async def test_failure_in_a_stream_is_an_error_event(served: Served) -> None:
    served.engine.failure = FinishReason("abort", message="too long", status_code=400)
    events = await served.events(PATH, {"text": "abc"})
    assert events[-1]["error"] == {
        "message": "too long", "type": "invalid_request_error", "param": None, "code": 400,
    }  # fmt: skip


async def test_abort_ends_every_choice_and_repeats_harmlessly(served: Served) -> None:
    served.engine.gate.clear()
    body = {"text": "a", "rid": "p1", "sampling_params": {"n": 4, "ignore_eos": True}}
    answer = asyncio.create_task(served.post(PATH, body))
    while not served.engine.num_running:
        await asyncio.sleep(0.001)
    for rid in ("p1", "p1", "never-seen"):
        assert await served.post("/abort_request", {"rid": rid}) == (200, None)
    status, choices = await answer
    assert status == 200
    assert [each["meta_info"]["finish_reason"]["type"] for each in choices] == ["abort"] * 4


@pytest.mark.parametrize("body", [{"rid": "b"}, {"abort_all": True}])
async def test_abort_ends_a_whole_batch(served: Served, body: dict[str, Any]) -> None:
    served.engine.gate.clear()
    answer = asyncio.create_task(served.post(PATH, {"text": ["a", "b"], "rid": "b"}))
    while served.engine.num_running < 2:
        await asyncio.sleep(0.001)
    assert (await served.post("/abort_request", body))[0] == 200
    _, choices = await answer
    assert [each["meta_info"]["finish_reason"]["type"] for each in choices] == ["abort"] * 2


async def test_abort_reaches_a_prompt_that_is_being_encoded(served: Served) -> None:
    served.engine.encode_gate.clear()
    served.engine.gate.clear()
    answer = asyncio.create_task(served.post(PATH, {"text": "a", "rid": "early"}))
    while not served.engine.num_encoding:
        await asyncio.sleep(0.001)
    assert (await served.post(PATH, {"text": "a", "rid": "early"}))[0] == 400
    await served.post("/abort_request", {"rid": "early"})
    served.engine.encode_gate.set()
    _, choice = await answer
    assert choice["meta_info"]["finish_reason"]["type"] == "abort"


async def test_abort_needs_an_id(served: Served) -> None:
    status, answer = await served.post("/abort_request", {})
    assert (status, answer["error"]["param"]) == (400, "rid")


async def test_duplicate_id_is_refused_while_it_runs(served: Served) -> None:
    served.engine.gate.clear()
    first = asyncio.create_task(served.post(PATH, {"text": "a", "rid": "same"}))
    while not served.engine.num_running:
        await asyncio.sleep(0.001)
    status, answer = await served.post(PATH, {"text": "a", "rid": "same"})
    assert (status, answer["error"]["param"]) == (400, "rid")
    served.engine.gate.set()
    assert (await first)[0] == 200
    assert (await served.post(PATH, {"text": "a", "rid": "same"}))[0] == 200
    status, _ = await served.post(PATH, {"text": ["a", "b"], "rid": ["same", "same"]})
    assert status == 400
