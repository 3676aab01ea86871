"""The blocking front: the same answers as the engine's own, in SGLang's dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import capacity, expected_tokens, make_parts

from treadle.engine import Engine, EngineClosed, InvalidRequest, SyncEngine
from treadle.graphs.fake import FakeExecutor

PROMPT = [5, 6, 7]
LONG = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncEngine]:
    async def create(**flags: Any) -> Engine:
        return Engine(make_parts(FakeExecutor(capacity()), **flags))

    monkeypatch.setattr(Engine, "create", create)
    with SyncEngine() as engine:
        yield engine


def test_answer_is_sglangs_dictionary(engine: SyncEngine) -> None:
    answer = engine.generate(input_ids=PROMPT, sampling_params=LONG)
    assert answer["output_ids"] == expected_tokens(PROMPT, 12)
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("id")
    assert meta == {
        "finish_reason": {"type": "length", "length": 12},
        "prompt_tokens": 3,
        "completion_tokens": 12,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "weight_version": "default",
        "dp_rank": None,
    }


def test_batch_and_choices_are_lists_in_order(engine: SyncEngine) -> None:
    prompts = [[1, 2], [3], [4, 5, 6]]
    batch = engine.generate(input_ids=prompts, sampling_params=LONG)
    assert [a["output_ids"] for a in batch] == [expected_tokens(p, 12) for p in prompts]
    assert len(engine.generate("text", {**LONG, "n": 2})) == 2


def test_stream_grows_to_the_answer(engine: SyncEngine) -> None:
    answer = engine.generate("abc", LONG)
    steps = list(engine.generate("abc", LONG, stream=True))
    for before, after in zip(steps, steps[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in before["meta_info"]
    for key in ("text", "output_ids"):
        assert steps[-1][key] == answer[key]
    assert steps[-1]["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]


def test_stream_left_early_is_aborted(engine: SyncEngine) -> None:
    steps = engine.generate("abc", {**LONG, "max_new_tokens": 400}, stream=True)
    next(steps)
    steps.close()
    assert engine.generate("abc", LONG)["meta_info"]["completion_tokens"] == 12


def test_bad_calls_are_refused(engine: SyncEngine) -> None:
    for prompt, ids in ((None, None), ("a", [1])):
        with pytest.raises(InvalidRequest, match="either prompt or input_ids"):
            engine.generate(prompt, input_ids=ids)
    with pytest.raises(InvalidRequest, match="n must be 1"):
        next(engine.generate("a", {"n": 2}, stream=True))
    engine.shutdown()
    with pytest.raises(EngineClosed, match="shut down"):
        engine.generate("a")
