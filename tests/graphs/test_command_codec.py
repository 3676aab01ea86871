"""Commands as bytes: whatever can be said comes back as it was, and nothing else is taken."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from treadle.graphs.buckets import GraphKey
from treadle.graphs.command_codec import (
    Capture,
    Close,
    Command,
    DecodeError,
    Discard,
    Release,
    Resume,
    Sampling,
    decode,
    digest,
    encode,
)
from treadle.graphs.step import (
    GraphChoice,
    Mode,
    PageTableUpdate,
    SamplingBatch,
    SlotInit,
    Step,
    StepPlan,
)

MODES: tuple[Mode, ...] = ("prefill", "decode", "mixed")


def a_step(rng: np.random.Generator) -> Step:
    """Any step, whether it makes sense or not; each optional part is there half of the time."""

    def ints(count: int) -> Any:
        return rng.integers(-(2**31), 2**31, count, dtype=np.int32)

    def bools(count: int) -> Any:
        return rng.random(count) < 0.5

    def maybe(make: Any) -> Any:
        return make() if rng.random() < 0.5 else None

    rows, tokens = int(rng.integers(0, 40)), int(rng.integers(0, 100))
    banned = (rng.integers(0, 9, 3), rng.integers(0, 2**40, 3))
    plan = StepPlan(
        mode=MODES[rng.integers(3)], req_slot=ints(rows), epoch=ints(rows), q_len=ints(rows),
        from_host=bools(rows), max_len=ints(rows), samples=bools(rows), token_ids=ints(tokens),
        page_updates={
            name: PageTableUpdate(ints(5), ints(5), ints(5))
            for name in ("full", "fenêtre")[: rng.integers(0, 3)]
        },
        slot_init=maybe(
            lambda: SlotInit(ints(3), ints(3), rng.integers(0, 2**64, 3, dtype=np.uint64))
        ),
        sampling=SamplingBatch(
            rng.random(rows, dtype=np.float32), bool(rng.random() < 0.5),
            maybe(lambda: bools(rows)), maybe(lambda: banned),
        ),
    )  # fmt: skip
    choice = maybe(lambda: GraphChoice(int(rng.integers(99)), int(rng.integers(99)), True))
    return Step(int(rng.integers(1, 2**62)), (plan,) * int(rng.integers(1, 3)), choice)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert np.array_equal(found, expected)
    elif is_dataclass(expected):
        for each in fields(expected):
            assert_same(getattr(found, each.name), getattr(expected, each.name))
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(found.items()), list(expected.items()))
    else:
        assert found == expected


@pytest.mark.parametrize("_", range(50))
def test_a_step_comes_back_as_it_was(_: int) -> None:
    step = a_step(np.random.default_rng())
    assert_same(decode(bytearray(encode(step))), step)


@pytest.mark.parametrize(
    "command",
    [
        Sampling(3, None),
        Sampling(4, np.random.default_rng().random((3, 101)) < 0.5),
        Sampling(5, np.zeros((0, 7), dtype=np.bool_)),
        Capture(GraphKey("prefill", 512, 0)),
        Capture(GraphKey("decode_split", 8, 8, "lora")),
        Discard(GraphKey("head", 1, 1)),
        Release(("weights", "cuda_graph")),
        Resume(("kv_cache",)),
        Resume(()),
        Close(),
    ],
    ids=str,
)
def test_other_commands_come_back_as_they_were(command: Command) -> None:
    assert_same(decode(encode(command)), command)


def test_arrays_of_another_type_arrive_in_the_declared_one() -> None:
    step = a_step(np.random.default_rng())
    slots: Any = np.arange(step.plan.num_rows, dtype=np.int64)[::-1]
    plan = replace(step.plan, req_slot=slots)
    found = decode(encode(Step(1, (plan,))))
    assert isinstance(found, Step)
    assert found.plan.req_slot.dtype == np.int32
    assert np.array_equal(found.plan.req_slot, plan.req_slot)


def test_bytes_that_end_early_go_on_or_say_nonsense_are_refused() -> None:
    rng = np.random.default_rng()
    data = encode(a_step(rng))
    for end in rng.integers(0, len(data) - 1, 50):
        with pytest.raises(DecodeError):
            decode(data[:end])
    with pytest.raises(DecodeError, match="more than a command"):
        decode(data + bytes(8))
    for first in (7, -1, 2**40):
        with pytest.raises(DecodeError):
            decode(first.to_bytes(8, "little", signed=True))


def test_digest_differs_with_any_part_of_the_step_and_with_the_tokens() -> None:
    step = a_step(np.random.default_rng())
    tokens = np.arange(5)
    plan = step.plan
    others = [
        digest(step, tokens + 1),
        digest(replace(step, seq=step.seq + 1), tokens),
        digest(replace(step, choice=GraphChoice(1, 1, False)), tokens),
        digest(replace(step, plans=(replace(plan, epoch=np.append(plan.epoch, 1)),)), tokens),
    ]  # fmt: skip
    assert digest(decode(encode(step)), tokens) == digest(step, tokens)  # type: ignore[arg-type]
    assert len({digest(step, tokens), *others}) == 5
