"""Every bad input is a 4xx that names the field, in strict JSON, and the server lives on."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
from fake_served import MAX_LEN, MODEL, VOCAB

from treadle.http.state import ApiSettings

if TYPE_CHECKING:
    from tests.http.conftest import Serve, Served

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
USER = {"role": "user", "content": "u"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "p"},
    NATIVE: {"text": "p"},
}


async def refused(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error; checks its form, and that the server still answers."""
    got, answer = await served.post(path, body)
    assert got == status, answer
    assert list(answer) == ["error"]
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str)
    kind = {404: "not_found_error", 503: "service_unavailable"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    assert error["type"] == kind
    assert (await served.post(TEXT, {"prompt": "p", "max_tokens": 1}))[0] == 200
    assert served.engine.num_running == 0
    return error


SAMPLING_CASES: list[tuple[str, list[Any]]] = [
    ("temperature", [-1, 1e9, "hot", True, [], "nan", {}]),
    ("top_p", [0, 1.5, -0.1, "1", False]),
    ("top_k", [0, -2, 1.5, "5", True]),
    ("min_p", [-0.1, 1.1, "0"]),
    ("frequency_penalty", [-2.1, 2.1, "0", True]),
    ("presence_penalty", [-2.1, 2.1, "0"]),
    ("repetition_penalty", [0, 2.1, -1, "1"]),
    ("n", [0, -1, 129, 10**9, 1.5, "1", True, 10**30]),
    ("stop", [["x"] * 33, [""], "", [1], 5, {"a": 1}, ["a" * 5000], [["a"]]]),
    ("stop_token_ids", [[VOCAB], [-1], ["1"], [1.5], [True], 5, list(range(2000))]),
    ("stop_regex", [["a"] * 33, ["a" * 300], 5]),
    ("ignore_eos", [1, "true", 0.0]),
    ("skip_special_tokens", [1, "yes"]),
    ("no_stop_trim", ["x"]),
    ("stream_interval", [0, -1, "1", 2.5]),
    ("logit_bias", [{"1": 101}, {str(VOCAB): 1}, {"-1": 1}, {"a": 1}, [1], {"1": "2"}]),
    ("regex", [5, ["a"]]),
    ("ebnf", [5]),
    ("custom_params", [5, "x", []]),
]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in SAMPLING_CASES for value in values],
    ids=lambda case: str(case)[:24],
)
async def test_sampling_field_out_of_range_is_named(
    served: Served, path: str, name: str, value: Any
) -> None:
    fields = {name: value}
    body = {**BASE[path], **({"sampling_params": fields} if path == NATIVE else fields)}
    error = await refused(served, path, body)
    shown = f"sampling_params.{name}" if path == NATIVE else name
    assert error["param"].startswith(shown)
    assert shown in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("value", [-1, "5", 2.5, True, [], 10**400])
async def test_max_tokens_is_an_integer_from_zero(served: Served, path: str, value: Any) -> None:
    error = await refused(served, path, {**BASE[path], "max_tokens": value})
    assert error["param"] == ("max_tokens" if value != 10**400 else None)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_chat_needs_room_for_an_answer(served: Served, name: str) -> None:
    error = await refused(served, CHAT, {**BASE[CHAT], name: 0})
    assert error["param"] == name
    assert "at least 1" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
async def test_what_is_no_json_number_is_refused(
    served: Served, path: str, word: str, name: str
) -> None:
    fields = f'"{name}": {word}'
    if path == NATIVE:
        fields = f'"sampling_params": {{{fields}}}'
    body = json.dumps(BASE[path])[:-1] + ", " + fields + "}"
    error = await refused(served, path, body.encode())
    assert "JSON" in error["message"]
    assert "column" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
async def test_minus_zero_is_a_legal_temperature(served: Served, path: str) -> None:
    fields = {"temperature": -0.0}
    body = {**BASE[path], **({"sampling_params": fields} if path == NATIVE else fields)}
    assert (await served.post(path, body))[0] == 200
    assert math.copysign(1, served.engine.submitted[0].params.temperature) == -1


@pytest.mark.parametrize(
    "body",
    [
        b"", b"   ", b"[]", b"null", b'"text"', b"5", b"{", b'{"prompt": "a"', b"{'a': 1}",
        b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a",}', b"\x00",
        b'{"prompt": ' + b"[" * 5000, b"\xef\xbb\xbf{}"[:4],
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE, "/abort_request"])
async def test_broken_body_is_refused(served: Served, path: str, body: bytes) -> None:
    await refused(served, path, body)


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data", "", "a;\x80"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_openai_routes_need_a_json_content_type(
    served: Served, path: str, content_type: str
) -> None:
    headers = {"Content-Type": content_type}
    async with served.session.post(served.url + path, data=b"{}", headers=headers) as response:
        assert response.status == 400
        assert "Content-Type" in (await response.json())["error"]["message"]


async def test_native_route_takes_any_content_type(served: Served) -> None:
    headers = {"Content-Type": "text/plain"}
    body = json.dumps(BASE[NATIVE])
    async with served.session.post(served.url + NATIVE, data=body, headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "messages",
    [
        None, [], {}, "hi", [[]], ["hi"], [5], [None], [{}], [{"content": "x"}],
        [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "root", "content": "x"}],
        [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": ["x"]}], [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "nope"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [USER, {"role": "assistant", "content": "a", "tool_calls": [{"id": 5}]}],
        [USER, {"role": "assistant", "content": "a", "audio": {"id": "x"}}],
        [{"role": "user", "content": "refuse me"}],
    ],
)  # fmt: skip
async def test_bad_messages_are_named(served: Served, messages: Any) -> None:
    error = await refused(served, CHAT, {"messages": messages})
    named = error["param"] or ""
    assert named.startswith("messages") or named == "audio"


async def test_deep_path_is_spelled_out(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]
    error = await refused(served, CHAT, {"messages": [USER, {"role": "user", "content": parts}]})
    assert error["param"] == "messages[1].content[1].text"
    assert error["message"] == "messages[1].content[1].text must be a string, got 5"


async def test_legal_words_are_listed(served: Served) -> None:
    error = await refused(served, CHAT, {"messages": [{"role": "root", "content": "x"}]})
    assert error["message"].startswith("messages[0].role must be one of 'system', ")
    assert error["message"].endswith("got 'root'")


async def test_message_of_the_template_reaches_the_client(served: Served) -> None:
    error = await refused(served, CHAT, {"messages": [{"role": "user", "content": "refuse me"}]})
    assert "roles must alternate" in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], {}, 5, True, [5.5], ["a", 5], [1, "a"], [[1], "a"], [[1], [1.5]], [[True]],
     [True], [None], [-1], [VOCAB], [200_000], [[1], [VOCAB]], [10**30], [1] * MAX_LEN,
     [[[1]]]],
    ids=lambda prompt: str(prompt)[:24],
)  # fmt: skip
async def test_bad_prompt_is_named(served: Served, prompt: Any) -> None:
    assert (await refused(served, TEXT, {"prompt": prompt}))["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": None}, "text"),
        ({"text": []}, "text"),
        ({"text": 5}, "text"),
        ({"text": ["a", 1]}, "text"),
        ({"text": [1]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": [1.5]}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": [[1], [VOCAB]]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_embeds": [[0.5]]}, "input_embeds"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, 5]}, "sampling_params[1]"),
        ({"text": "a", "sampling_params": {"nope": 1}}, "sampling_params.nope"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"nope": 1}]}, "sampling_params[1].nope"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": "x" * 1000}, "rid"),
        ({"text": "a", "rid": 5}, "rid"),
        ({"text": "a", "rid": ["x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "top_logprobs_num": "1"}, "top_logprobs_num"),
        ({"text": "a", "custom_labels": {"a": 1}}, "custom_labels.a"),
        ({"text": "a", "data_parallel_rank": 1}, "data_parallel_rank"),
    ],
)
async def test_bad_generate_field_is_named(
    served: Served, body: dict[str, Any], param: str
) -> None:
    assert (await refused(served, NATIVE, body))["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"best_of": 1, "n": 2}, "best_of"),
        (TEXT, {"best_of": 0}, "best_of"),
        (TEXT, {"best_of": 10**9}, "best_of"),
        (TEXT, {"logprobs": -1}, "logprobs"),
        (TEXT, {"logprobs": 21}, "logprobs"),
        (TEXT, {"logprobs": True}, "logprobs"),
        (TEXT, {"echo": 1}, "echo"),
        (CHAT, {"top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 10**9}, "top_logprobs"),
        (CHAT, {"top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"tool_choice": "maybe"}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {"stream": 1}, "stream"),
        (CHAT, {"user": 5}, "user"),
        (CHAT, {"metadata": {"a": 5}}, "metadata.a"),
        (CHAT, {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (CHAT, {"service_tier": "gold"}, "service_tier"),
        (CHAT, {"seed": "7"}, "seed"),
        (CHAT, {"seed": 2**63}, "seed"),
        (CHAT, {"seed": 1.5}, "seed"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
        (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
        (CHAT, {"model": 5}, "model"),
        (CHAT, {"reasoning_effort": "extreme"}, "reasoning_effort"),
    ],
)
async def test_bad_openai_field_is_named(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    assert (await refused(served, path, {**BASE[path], **fields}))["param"] == param


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", ["", "other", "/models/tiny", MODEL + "x", "x" * 10_000])
async def test_unknown_model_lists_the_served_names(served: Served, path: str, name: str) -> None:
    error = await refused(served, path, {**BASE[path], "model": name}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]
    assert len(error["message"]) < 300


async def test_message_stays_short_for_a_huge_value(served: Served) -> None:
    error = await refused(served, TEXT, {"prompt": {"x": ["y" * 100_000] * 20}})
    assert len(error["message"]) < 500


async def test_many_choices_in_one_call_are_refused(served: Served) -> None:
    error = await refused(served, TEXT, {"prompt": ["a"] * 1000, "n": 128})
    assert "choices" in error["message"]


@pytest.mark.parametrize("declares_length", [True, False])
async def test_too_large_body_is_413(serve: Serve, declares_length: bool) -> None:
    served = await serve(ApiSettings(max_body_bytes=1000))
    body = json.dumps({"prompt": "x" * 2000}).encode()

    async def pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    data = body if declares_length else pieces()
    headers = {"Content-Type": "application/json"}
    async with served.session.post(served.url + TEXT, data=data, headers=headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_falsely_declared_compression_is_400(served: Served, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    data = bytes(random.randrange(256) for _ in range(50))
    async with served.session.post(served.url + TEXT, data=data, headers=headers) as response:
        assert response.status == 400
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_unknown_route_is_404_json(served: Served) -> None:
    async with served.session.get(served.url + "/nope%ED%A0%80/\u2028") as response:
        assert response.status == 404
        error = (await response.json())["error"]
        assert error["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, {"POST"}),
        ("DELETE", NATIVE, {"POST", "PUT"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
    ],
)
async def test_wrong_method_is_405_with_allow(
    served: Served, method: str, path: str, allow: set[str]
) -> None:
    async with served.session.request(method, served.url + path) as response:
        assert response.status == 405
        assert set(response.headers["Allow"].split(", ")) == allow
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
