"""`/v1/chat/completions` against a fake engine, over real sockets."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from fake_served import BOS, EOS, MODEL, reply, reply_text

from treadle.engine.output import FinishReason
from treadle.http.state import ApiSettings

if TYPE_CHECKING:
    from tests.http.conftest import Serve, Served

PATH = "/v1/chat/completions"


def word() -> str:
    return "".join(random.choices("abcdefgh éß🦙", k=12)).strip() or "x"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def prompt_ids(text: str) -> list[int]:
    return [BOS, *text.encode()]


def folded(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Content, finish and order of every choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            index, delta = choice["index"], choice["delta"]
            if index not in choices:
                assert delta == {"role": "assistant", "content": ""}, "the role comes first"
                choices[index] = {"content": "", "finish_reason": None, "matched_stop": None}
                continue
            assert choices[index]["finish_reason"] is None, "nothing follows the finish"
            choices[index]["content"] += delta.get("content", "")
            choices[index]["finish_reason"] = choice["finish_reason"]
            choices[index]["matched_stop"] = choice["matched_stop"]
    return choices


async def test_answer_has_every_field(served: Served) -> None:
    text = word()
    status, answer = await served.post(PATH, {"model": MODEL, "messages": user(text)})
    ids = prompt_ids(f"user:{text}|assistant:")
    assert status == 200
    assert answer["id"].startswith("chatcmpl-") and len(answer["id"]) == len("chatcmpl-") + 32
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["metadata"] == {"weight_version": "default"}
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": reply_text(ids),
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": EOS,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": len(reply(ids, 0)),
        "total_tokens": len(ids) + len(reply(ids, 0)),
        "prompt_tokens_details": None,
    }


async def test_prompt_has_one_bos(served: Served) -> None:
    await served.post(PATH, {"messages": user(word())})
    ids = served.engine.submitted[0].ids
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_stream_equals_answer(served: Served, n: int) -> None:
    body = {"messages": user(word()), "n": n, "stream_options": {"include_usage": True}}
    events = await served.events(PATH, body)
    _, answer = await served.post(PATH, {"messages": body["messages"], "n": n})
    choices = folded(events)
    assert len(choices) == n
    for choice in answer["choices"]:
        streamed = choices[choice["index"]]
        assert streamed["content"] == choice["message"]["content"]
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["matched_stop"] == choice["matched_stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_usage_counts_the_prompt_once_for_n(served: Served) -> None:
    text = word()
    _, answer = await served.post(PATH, {"messages": user(text), "n": 4})
    ids = prompt_ids(f"user:{text}|assistant:")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == sum(len(reply(ids, i)) for i in range(4))


async def test_continuous_usage_grows_to_the_whole(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": user(word()), "stream_options": options}
    usages = [event["usage"] for event in await served.events(PATH, body)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert usages[-1] == usages[-2]
    assert len({usage["prompt_tokens"] for usage in usages}) == 1


async def test_usage_is_absent_from_a_plain_stream(served: Served) -> None:
    events = await served.events(PATH, {"messages": user(word())})
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("n", [1, 3])
async def test_cached_tokens_show_when_reported(serve: Serve, n: int) -> None:
    served = await serve(ApiSettings(enable_cache_report=True))
    served.engine.num_cached = random.choice((0, 3, 10**6))
    body = {"messages": user(word()), "n": n}
    _, answer = await served.post(PATH, body)
    usage = answer["usage"]
    expected = min(served.engine.num_cached, usage["prompt_tokens"] - 1)
    assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.events(PATH, {**body, "stream_options": options})
    assert events[-1]["usage"] == usage
    found = [event["usage"]["prompt_tokens_details"]["cached_tokens"] for event in events]
    assert found == sorted(found)


async def test_text_parts_equal_the_string_they_make(served: Served) -> None:
    texts = [random.choice((word(), "", "\n")) for _ in range(random.randrange(1, 5))]
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    parts.insert(random.randrange(len(parts) + 1), {"type": "thinking", "thinking": "hm"})
    for content in (parts, "\n".join(texts)):
        status, _ = await served.post(PATH, {"messages": user(content)})
        assert status == 200
    first, second = served.engine.submitted
    assert first.ids == second.ids == prompt_ids(f"user:{chr(10).join(texts)}|assistant:")


async def test_developer_reaches_the_template_as_system(served: Served) -> None:
    text = word()
    messages = [{"role": "developer", "content": text}, *user("u")]
    await served.post(PATH, {"messages": messages})
    assert served.engine.submitted[0].ids == prompt_ids(f"system:{text}|user:u|assistant:")


async def test_tool_history_reaches_the_template(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *user("u"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    status, _ = await served.post(PATH, {"messages": messages})
    assert status == 200
    expected = prompt_ids("user:u|assistant:|tool:42|assistant:")
    assert served.engine.submitted[0].ids == expected


async def test_final_message_is_continued(served: Served) -> None:
    messages = [*user("u"), {"role": "assistant", "content": "The answer"}]
    await served.post(PATH, {"messages": messages, "continue_final_message": True})
    assert served.engine.submitted[0].ids == prompt_ids("user:u|assistant:The answer")


async def test_template_kwargs_reach_the_template(served: Served) -> None:
    await served.post(PATH, {"messages": user("u"), "chat_template_kwargs": {"mood": "calm"}})
    assert served.engine.submitted[0].ids == prompt_ids("user:u|calm|assistant:")


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 3, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 10**18}, 10**18),
    ],
)
async def test_length_absent_means_the_rest(
    served: Served, body: dict[str, Any], limit: int | None
) -> None:
    status, _ = await served.post(PATH, {"messages": user("u"), **body})
    assert status == 200
    assert served.engine.submitted[0].params.max_new_tokens == limit


async def test_length_limit_finishes_with_length(served: Served) -> None:
    text = word()
    _, answer = await served.post(PATH, {"messages": user(text), "max_tokens": 2})
    ids = prompt_ids(f"user:{text}|assistant:")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["matched_stop"] is None
    assert answer["choices"][0]["message"]["content"] == reply_text(ids, limit=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_rid_is_the_id_of_request_and_answer(served: Served) -> None:
    _, answer = await served.post(PATH, {"messages": user("u"), "rid": "mine"})
    assert answer["id"] == "mine"
    assert served.engine.submitted[0].request_id == "mine"


async def test_fields_that_change_nothing_pass(served: Served) -> None:
    body = {
        "messages": user("u"), "user": "u1", "store": True, "metadata": {"a": "b"},
        "service_tier": "flex", "safety_identifier": "s", "prompt_cache_key": "k",
        "parallel_tool_calls": False, "modalities": ["text"], "verbosity": "medium",
        "response_format": {"type": "text"}, "logprobs": False, "top_logprobs": 0, "tools": [],
        "tool_choice": "none", "reasoning_effort": None, "frequency_penalty": 0, "logit_bias": {},
        "unknown_extension": {"deep": [1]}, "bootstrap_host": None, "data_parallel_rank": 0,
        "prediction": {"type": "content", "content": "x"}, "lora_path": None, "priority": 3,
    }  # fmt: skip
    status, answer = await served.post(PATH, body)
    assert status == 200, answer


async def test_failure_of_the_engine_is_its_status(served: Served) -> None:
    served.engine.failure = FinishReason("abort", message="the step failed", status_code=500)
    status, answer = await served.post(PATH, {"messages": user("u")})
    assert status == 500
    assert answer["error"]["message"] == "the step failed"
    assert answer["error"]["type"] == "server_error"


async def test_failure_in_a_stream_is_an_event_before_done(served: Served) -> None:
    served.engine.failure = FinishReason("abort", message="the step failed", status_code=500)
    events = await served.events(PATH, {"messages": user("u")})
    assert events[-1]["error"]["message"] == "the step failed"
    assert [choice["finish_reason"] for e in events[:-1] for choice in e["choices"]] == [None, None]
