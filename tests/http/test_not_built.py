"""A legal value that this version cannot honour is refused by name, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.http.conftest import Served

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "u"}]},
    TEXT: {"prompt": "p"},
    NATIVE: {"text": "p"},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, fields) for path in (CHAT, TEXT) for fields in (
            {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1},
            {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"repetition_penalty": 1.1},
            {"stop_regex": "a+"}, {"beam_width": 2}, {"logit_bias": {"5": 1}}, {"regex": "a"},
            {"ebnf": "root ::= x"}, {"structural_tag": "{}"}, {"custom_params": {"a": 1}},
            {"watermark": {"a": 1}}, {"lora_path": "a"}, {"session_params": {"id": "x"}},
            {"session_id": "s"}, {"custom_logit_processor": "x"}, {"return_hidden_states": True},
            {"return_hidden_states": "last"}, {"return_routed_experts": True},
            {"return_token_ids": True}, {"bootstrap_host": "h"}, {"bootstrap_port": 1},
            {"bootstrap_room": 0}, {"disagg_prefill_dp_rank": 0},
            {"response_format": {"type": "json_object"}}, {"response_format": SCHEMA},
        )),
        (CHAT, {"tools": [TOOL]}), (CHAT, {"functions": [{"name": "f"}]}),
        (CHAT, {"logprobs": True}), (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"audio": {"voice": "x"}}), (CHAT, {"web_search_options": {}}),
        (CHAT, {"reasoning_effort": "low"}), (CHAT, {"verbosity": "high"}),
        (CHAT, {"thinking": True}), (CHAT, {"input_ids": [1]}), (CHAT, {"return_meta_info": True}),
        (TEXT, {"logprobs": 0}), (TEXT, {"logprobs": 5}), (TEXT, {"suffix": "s"}),
        (TEXT, {"best_of": 3, "n": 2}), (TEXT, {"json_schema": "{}"}),
        (NATIVE, {"return_logprob": True}), (NATIVE, {"return_logprob": [False, True]}),
        (NATIVE, {"token_ids_logprob": [1]}), (NATIVE, {"image_data": "x"}),
        (NATIVE, {"lora_path": ["a"]}), (NATIVE, {"session_params": {"id": "x"}}),
        (NATIVE, {"return_hidden_states": True}), (NATIVE, {"background": True}),
        (NATIVE, {"bootstrap_host": "h"}), (NATIVE, {"return_prompt_token_ids": True}),
        (NATIVE, {"custom_logit_processor": "x"}), (NATIVE, {"max_thinking_tokens": 0}),
        (NATIVE, {"sampling_params": {"top_p": 0.5}}),
        (NATIVE, {"sampling_params": {"json_schema": "{}"}}),
    ],
)  # fmt: skip
async def test_what_is_not_built_says_so(served: Served, path: str, fields: dict[str, Any]) -> None:
    status, answer = await served.post(path, {**BASE[path], **fields})
    error = answer["error"]
    name = next(iter(fields))
    if name == "sampling_params":
        name += "." + next(iter(fields[name]))
    assert status == 400
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported yet")
