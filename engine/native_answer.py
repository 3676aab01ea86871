"""An answer as SGLang's native API shapes it. Plain values; knows no transport and no JSON."""

from __future__ import annotations

from typing import Any

from treadle.engine.output import Completion, FinishReason, RequestOutput

ABORTED = "the request was aborted"


def native_answer(
    completion: Completion, elapsed_s: float, weight_version: str = "default"
) -> dict[str, Any]:
    """text, output_ids and meta_info of a choice, finished or so far."""
    return {
        "text": completion.text,
        "output_ids": list(completion.token_ids),
        "meta_info": meta_info(completion, elapsed_s, weight_version),
    }


def meta_info(
    output: RequestOutput | Completion, elapsed_s: float, weight_version: str = "default"
) -> dict[str, Any]:
    """elapsed_s: since the call began; it is told with the end only."""
    reason = output.finish_reason
    meta: dict[str, Any] = {
        "id": output.request_id,
        "finish_reason": None if reason is None else _reason(reason, output.completion_tokens),
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": output.completion_tokens,
        "cached_tokens": output.cached_tokens,
        "reasoning_tokens": 0,
        "num_retractions": output.num_retractions,
        "weight_version": weight_version,
        "dp_rank": None,
    }
    if reason is not None:
        meta["e2e_latency"] = elapsed_s
    return meta


def _reason(reason: FinishReason, completion_tokens: int) -> dict[str, Any]:
    match reason.type:
        case "stop":
            return {"type": "stop", "matched": reason.matched}
        case "length":
            return {"type": "length", "length": completion_tokens}
        case "abort":
            return {
                "type": "abort",
                "message": reason.message or ABORTED,
                "status_code": reason.status_code,
                "err_type": None,
            }
