"""The fields that chat and text completions share: OpenAI's own and SGLang's extensions.

Declares types; the ranges of sampling fields are SamplingParams' alone. Knows no route.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from pydantic import Field

from treadle.engine.errors import InvalidRequest, NotBuilt
from treadle.engine.sampling_params import SamplingParams
from treadle.http.wire.base import DpRank, FastList, Ids, Strs, Unbuilt, Wire
from treadle.http.wire.queueing import QueueFields

_CLIENT_NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed"}


class StreamOptions(Wire):
    include_usage: bool = False  # a last chunk with the usage of the whole call
    continuous_usage_stats: bool = False  # the usage so far on every chunk
    include_obfuscation: bool = False  # padding against eavesdroppers; no text changes


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: FastList[dict[str, Any]] | None = None
    triggers: FastList[str] | None = None
    format: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises: InvalidRequest, NotBuilt."""
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidRequest(
                "response_format.json_schema is required", "response_format.json_schema"
            )
        if self.type != "text":
            raise NotBuilt("response_format", f"type {self.type!r}")


class SamplingFields(Wire):
    """How to choose tokens and when to stop. None leaves SamplingParams' default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Strs | None = None
    stop_token_ids: Ids | None = None
    stop_regex: Strs | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    beam_width: int | None = None
    logit_bias: dict[str, float] | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    custom_params: dict[str, Any] | None = None
    watermark: dict[str, Any] | None = None

    def to_params(self, max_new_tokens: int | None) -> SamplingParams:
        names = (f.name for f in fields(SamplingParams) if f.name != "max_new_tokens")
        given = {name: getattr(self, _CLIENT_NAMES.get(name, name)) for name in names}
        set_here = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_new_tokens=max_new_tokens, **set_here)

    def client_name(self, name: str) -> str:
        """The client's name for a field of SamplingParams, `prompt` or `rid`."""
        return _CLIENT_NAMES.get(name, name)


class CommonFields(SamplingFields, QueueFields):
    """What both APIs of the OpenAI family take besides prompt, length and logprobs."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # who asks and what for: never part of the answer
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    custom_labels: dict[str, str] | None = None

    lora_path: Unbuilt[str | FastList[str]] = None
    session_params: Unbuilt[dict[str, Any]] = None
    session_id: Unbuilt[str] = None
    custom_logit_processor: Unbuilt[str | FastList[str]] = None
    return_hidden_states: Unbuilt[bool | Literal["last"]] = None
    return_routed_experts: Unbuilt[bool] = None
    return_cached_tokens_details: Unbuilt[bool] = None
    return_spec_tokens_details: Unbuilt[bool] = None
    return_token_ids: Unbuilt[bool] = None
    bootstrap_host: Unbuilt[str | FastList[str]] = None
    bootstrap_port: Unbuilt[int | FastList[int]] = None
    bootstrap_room: Unbuilt[int | FastList[int]] = None
    routed_dp_rank: DpRank = None
    data_parallel_rank: DpRank = None
    disagg_prefill_dp_rank: Unbuilt[int] = None

    def check_common(self) -> None:
        """Raises: InvalidRequest, NotBuilt."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        if self.response_format is not None:
            self.response_format.check()
