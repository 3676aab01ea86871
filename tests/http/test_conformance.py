"""Every field of the request schemas is declared; every sampling parameter can be reached."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest

from treadle.engine.sampling_params import SamplingParams
from treadle.http.wire.chat import ChatRequest
from treadle.http.wire.completions import CompletionRequest
from treadle.http.wire.native import GenerateRequest

# OpenAI's request schemas
OPENAI_CHAT = """audio frequency_penalty function_call functions logit_bias logprobs
    max_completion_tokens max_tokens messages metadata modalities model n parallel_tool_calls
    prediction presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort
    response_format safety_identifier seed service_tier stop store stream stream_options
    temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"""
OPENAI_TEXT = """best_of echo frequency_penalty logit_bias logprobs max_tokens model n
    presence_penalty prompt seed stop stream stream_options suffix temperature top_p user"""
# SGLang's extensions, interface reference 6.8
SGLANG_BOTH = """top_k min_p min_tokens repetition_penalty stop_token_ids stop_regex no_stop_trim
    ignore_eos skip_special_tokens regex ebnf lora_path session_params session_id
    custom_logit_processor custom_params return_hidden_states return_routed_experts
    return_cached_tokens_details return_spec_tokens_details return_token_ids rid extra_key
    cache_salt priority bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
    disagg_prefill_dp_rank data_parallel_rank response_format"""
SGLANG_CHAT = """separate_reasoning stream_reasoning chat_template_kwargs continue_final_message
    input_ids return_prompt_token_ids return_meta_info thinking"""
SGLANG_TEXT = "json_schema custom_labels"
# SGLang's /generate, interface reference 6.3
SGLANG_NATIVE = """text input_ids input_embeds image_data video_data audio_data sampling_params rid
    return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs
    stream lora_path session_params session_id custom_logit_processor return_hidden_states
    return_routed_experts routed_experts_start_len return_indexer_topk return_sampling_mask
    sampling_logprobs_mode return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs
    return_flat_raw_top_logprobs_b64 return_prompt_token_ids return_entropy return_bytes modalities
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank
    data_parallel_rank disagg_prefill_dp_rank priority extra_key cache_salt routing_key
    conversation_id require_reasoning max_thinking_tokens log_metrics no_logs background
    custom_labels mm_hashes mm_content_hashes use_audio_in_video video_config mm_processor_kwargs
    images_config max_dynamic_patch watermark positional_embed_overrides
    multi_item_delimiter_indices token_indices_to_pool kv_hints external_trace_header received_time
    need_wait_for_mm_inputs num_items_assigned encoder_urls model lora_id"""

VALUES: dict[str, tuple[Any, Any]] = {  # what a client sends, what the engine gets
    "min_new_tokens": (3, 3), "temperature": (0.5, 0.5), "top_p": (0.5, 0.5), "top_k": (7, 7),
    "min_p": (0.1, 0.1), "frequency_penalty": (0.1, 0.1), "presence_penalty": (0.2, 0.2),
    "repetition_penalty": (1.2, 1.2), "stop": ("x", ("x",)), "stop_token_ids": ([5], (5,)),
    "stop_regex": (["a", "b"], ("a", "b")), "ignore_eos": (True, True), "n": (2, 2),
    "sampling_seed": (-9, -9), "skip_special_tokens": (False, False),
    "spaces_between_special_tokens": (False, False), "no_stop_trim": (True, True),
    "stream_interval": (4, 4), "beam_width": (2, 2), "logit_bias": ({"5": 1.5}, {"5": 1.5}),
    "regex": ("a", "a"), "json_schema": ("{}", "{}"), "ebnf": ("r", "r"),
    "structural_tag": ("{}", "{}"), "custom_params": ({"a": 1}, {"a": 1}),
    "watermark": ({"a": 1}, {"a": 1}), "max_new_tokens": (9, 9),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wire", "names"),
    [
        (ChatRequest, " ".join((OPENAI_CHAT, SGLANG_BOTH, SGLANG_CHAT))),
        (CompletionRequest, " ".join((OPENAI_TEXT, SGLANG_BOTH, SGLANG_TEXT))),
        (GenerateRequest, SGLANG_NATIVE),
    ],
)
def test_schema_declares_every_field(wire: Any, names: str) -> None:
    assert set(names.split()) - set(wire.model_fields) == set()


def test_values_cover_every_sampling_parameter() -> None:
    assert set(VALUES) == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("name", VALUES)
def test_sampling_parameter_is_reached_from_every_route(name: str) -> None:
    sent, expected = VALUES[name]
    message = {"role": "user", "content": "u"}
    for wire, base in (
        (ChatRequest, {"messages": [message]}),
        (CompletionRequest, {"prompt": "p"}),
    ):
        body = wire.parse(base)
        client = body.client_name(name)
        parsed = wire.parse({**base, client: sent})
        length = parsed.length if isinstance(parsed, ChatRequest) else parsed.max_tokens
        assert getattr(parsed.to_params(length), name) == expected
    native = GenerateRequest.parse({"text": "p", "sampling_params": {name: sent}})
    assert getattr(native.params(1)[0], name) == expected


@pytest.mark.parametrize("wire", [ChatRequest, CompletionRequest, GenerateRequest])
def test_null_is_the_default_of_every_field(wire: Any) -> None:
    required = {ChatRequest: "messages", CompletionRequest: "prompt", GenerateRequest: "text"}[wire]
    value: Any = [{"role": "user", "content": "u"}] if wire is ChatRequest else "p"
    names = [name for name in wire.model_fields if name != required]
    random.shuffle(names)
    assert wire.parse({required: value, **dict.fromkeys(names)}) == wire.parse({required: value})


def test_defaults_are_those_of_the_engine() -> None:
    params = CompletionRequest.parse({"prompt": "p"}).to_params(16)
    assert params == SamplingParams(max_new_tokens=16)
