"""The bodies of `/generate` and `/abort_request`, SGLang's own API. Knows no engine.

A field that may differ per prompt is a single value for all prompts or a list with one for each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from treadle.engine.errors import InvalidRequest
from treadle.engine.sampling_params import SamplingParams
from treadle.http.wire.base import (
    DpRank,
    FastList,
    Key,
    Prompts,
    Rid,
    Texts,
    TokenIds,
    Unbuilt,
    Wire,
)
from treadle.http.wire.queueing import QueueFields

Flags = bool | FastList[bool]
Counts = Annotated[int, Field(ge=-1)] | FastList[Annotated[int, Field(ge=-1)]]
Objects = dict[str, Any] | FastList[dict[str, Any]]


class GenerateRequest(QueueFields):
    text: Texts | None = None
    input_ids: TokenIds | None = None
    input_embeds: Unbuilt[FastList[Any]] = None
    sampling_params: Objects = {}
    rid: Rid | FastList[Rid] | None = None
    stream: bool = False

    routing_key: Key | None = None

    # who asks and what is logged: never part of the answer
    model: Any = None
    conversation_id: str | None = None
    log_metrics: bool = True
    no_logs: bool = False
    custom_labels: dict[str, str] | None = None
    external_trace_header: dict[str, Any] | None = None
    received_time: float | None = None
    # only read together with a flag that is refused below
    logprob_start_len: Counts = -1
    top_logprobs_num: Counts = 0
    return_text_in_logprobs: bool = False
    routed_experts_start_len: int = 0
    modalities: FastList[str] | None = None

    return_logprob: Unbuilt[Flags] = None
    token_ids_logprob: Unbuilt[FastList[int] | FastList[FastList[int]]] = None
    return_flat_raw_top_logprobs: Unbuilt[bool] = None
    return_flat_raw_output_top_logprobs: Unbuilt[bool] = None
    return_flat_raw_top_logprobs_b64: Unbuilt[bool] = None
    return_hidden_states: Unbuilt[Flags | Literal["last"]] = None
    return_routed_experts: Unbuilt[bool] = None
    return_indexer_topk: Unbuilt[bool] = None
    return_sampling_mask: Unbuilt[bool] = None
    sampling_logprobs_mode: Unbuilt[Literal["selected", "support"]] = None
    return_prompt_token_ids: Unbuilt[bool] = None
    return_entropy: Unbuilt[bool] = None
    return_bytes: Unbuilt[bool] = None
    require_reasoning: Unbuilt[bool] = None
    max_thinking_tokens: Unbuilt[int] = None
    background: Unbuilt[bool] = None
    watermark: Unbuilt[Objects] = None
    lora_path: Unbuilt[str | FastList[str | None]] = None
    lora_id: Unbuilt[str | FastList[str | None]] = None
    session_params: Unbuilt[Objects] = None
    session_id: Unbuilt[str] = None
    custom_logit_processor: Unbuilt[str | FastList[str | None]] = None

    image_data: Unbuilt[Any] = None
    video_data: Unbuilt[Any] = None
    audio_data: Unbuilt[Any] = None
    mm_hashes: Unbuilt[Any] = None
    mm_content_hashes: Unbuilt[Any] = None
    mm_processor_kwargs: Unbuilt[dict[str, Any]] = None
    use_audio_in_video: Unbuilt[bool] = None
    video_config: Unbuilt[dict[str, Any]] = None
    images_config: Unbuilt[dict[str, Any]] = None
    max_dynamic_patch: Unbuilt[int] = None
    min_dynamic_patch: Unbuilt[int] = None
    image_max_dynamic_patch: Unbuilt[int] = None
    video_max_dynamic_patch: Unbuilt[int] = None

    bootstrap_host: Unbuilt[str | FastList[str | None]] = None
    bootstrap_port: Unbuilt[int | FastList[int | None]] = None
    bootstrap_room: Unbuilt[int | FastList[int | None]] = None
    bootstrap_pair_key: Unbuilt[str | FastList[str | None]] = None
    decode_tp_size: Unbuilt[int | FastList[int | None]] = None
    routed_dp_rank: DpRank = None
    data_parallel_rank: DpRank = None
    disagg_prefill_dp_rank: Unbuilt[int] = None
    positional_embed_overrides: Unbuilt[Any] = None
    multi_item_delimiter_indices: Unbuilt[Any] = None
    token_indices_to_pool: Unbuilt[Any] = None
    kv_hints: Unbuilt[Any] = None
    need_wait_for_mm_inputs: Unbuilt[Any] = None
    num_items_assigned: Unbuilt[Any] = None
    encoder_urls: Unbuilt[Any] = None

    def check(self) -> None:
        """What no single field can tell.

        Raises: InvalidRequest.
        """
        given = [name for name in ("text", "input_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"exactly one of text and input_ids is required, got {len(given)}", "text"
            )

    @property
    def prompts(self) -> Prompts:
        chosen = self.input_ids if self.text is None else self.text
        assert chosen is not None, "check() comes first"
        return chosen

    def client_name(self, name: str) -> str:
        """The client's name for a field of SamplingParams, `prompt` or `rid`."""
        if name == "prompt":
            return "input_ids" if self.text is None else "text"
        return name if name == "rid" else f"sampling_params.{name}"

    def params(self, count: int) -> list[SamplingParams]:
        """One SamplingParams per prompt.

        Raises: InvalidRequest for an unknown key, a wrong type or a list of another length.
        """
        if isinstance(self.sampling_params, dict):
            return [SamplingParams.from_mapping(self.sampling_params)] * count
        if len(self.sampling_params) != count:
            raise InvalidRequest(
                f"sampling_params must have one entry for each of the {count} prompts, "
                f"got {len(self.sampling_params)}",
                "sampling_params",
            )
        return [
            SamplingParams.from_mapping(values, f"sampling_params[{i}]")
            for i, values in enumerate(self.sampling_params)
        ]


class AbortRequest(Wire):
    rid: str | None = None
    abort_all: bool = False

    def check(self) -> None:
        """Raises: InvalidRequest."""
        if not self.abort_all and not self.rid:
            raise InvalidRequest("rid is required unless abort_all is true", "rid")
