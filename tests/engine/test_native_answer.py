"""SGLang's dictionary of an answer: what ended it, and what is told with the end only."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.engine.native_answer import ABORTED, meta_info, native_answer
from treadle.engine.output import Completion, FinishReason, RequestOutput


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (FinishReason("stop", 7), {"type": "stop", "matched": 7}),
        (FinishReason("stop", "END"), {"type": "stop", "matched": "END"}),
        (FinishReason("length"), {"type": "length", "length": 4}),
        (FinishReason("abort"), {"message": ABORTED, "status_code": None}),
        (FinishReason("abort", None, "oh", 503), {"message": "oh", "status_code": 503}),
    ],
)
def test_reason_is_worded_as_sglang_words_it(
    reason: FinishReason, expected: dict[str, Any]
) -> None:
    if reason.type == "abort":
        expected = {"type": "abort", "err_type": None, **expected}
    meta = meta_info(RequestOutput("r", 0, "", [], 3, 4, 2, reason, 1), 1.5, "v2")
    assert meta["finish_reason"] == expected
    assert meta["e2e_latency"] == 1.5
    assert (meta["weight_version"], meta["num_retractions"], meta["cached_tokens"]) == ("v2", 1, 2)


def test_unfinished_choice_has_no_reason_and_no_latency() -> None:
    completion = Completion("r", 0, "text", [1, 2], 3, 2, 0)
    answer = native_answer(completion, 1.5)
    assert (answer["text"], answer["output_ids"]) == ("text", [1, 2])
    assert answer["output_ids"] is not completion.token_ids
    assert answer["meta_info"]["finish_reason"] is None
    assert "e2e_latency" not in answer["meta_info"]
