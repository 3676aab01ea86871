"""A pool that is too small, a queue that is too long, and requests that matter more than others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import EOS, capacity, expected_tokens

from treadle.engine import (
    Engine,
    InvalidRequest,
    NotIdle,
    QueueFull,
    RequestOptions,
    RequestOutput,
    SamplingParams,
)
from treadle.engine.kv_pages import KvPages
from treadle.graphs.fake import FakeExecutor, default_token
from treadle.graphs.step import KvGroup

MakeEngine = Callable[..., Engine]


def without_end(prefix: int, length: int, vocab_size: int) -> int:
    return default_token(prefix, length, EOS)


def small_pool(page_size: int, tokens: int, depth: int = 2, max_model_len: int = 1000) -> Any:
    group = KvGroup("full", page_size, tokens // page_size, 64)
    return FakeExecutor(
        capacity(group, max_model_len=max_model_len), depth=depth, token_function=without_end
    )


def watch(engine: Engine, prompt: list[int], params: SamplingParams, **options: Any) -> list[Any]:
    """Submits a request; its deltas come into the list."""
    got: list[RequestOutput] = []
    engine.submit(prompt, params, got.append, options=RequestOptions(**options))
    return got


async def ended(got: list[RequestOutput]) -> RequestOutput:
    while not got or got[-1].finish_reason is None:
        await asyncio.sleep(0)
    return got[-1]


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("admission", ["observed", "sglang"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_twelve_long_answers_share_a_pool_for_three(
    make_engine: MakeEngine, depth: int, page_size: int, admission: str, ignore_eos: bool
) -> None:
    engine = make_engine(
        small_pool(page_size, 2000, depth), admission=admission, schedule_conservativeness=0.1
    )
    prompts = [[number, *range(20)] for number in range(12)]
    answers = await engine.generate(prompts, SamplingParams(600, ignore_eos=ignore_eos))
    assert [a.token_ids for a in answers] == [expected_tokens(p, 600, without_end) for p in prompts]
    assert all(a.num_retractions <= 12 for a in answers)
    again = await engine.generate(prompts[:2], SamplingParams(600, ignore_eos=ignore_eos))
    assert [a.num_retractions for a in again] == [0, 0], "the pressure is gone"


async def test_prefills_without_room_make_some_instead_of_hanging(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    room_for, calls = KvPages.room_for, iter(range(10**6))
    monkeypatch.setattr(
        KvPages, "room_for", lambda pages, r: 0 if next(calls) < 2 else room_for(pages, r)
    )
    prompts = [[number] * 30 for number in range(3)]
    answers = await asyncio.wait_for(
        engine.generate(prompts, SamplingParams(5, ignore_eos=True)), 10
    )
    assert [a.token_ids for a in answers] == [expected_tokens(p, 5) for p in prompts]
    assert sum(a.num_retractions for a in answers) > 0 and not answers[0].num_retractions


@pytest.mark.parametrize("chunk", [-1, 64])
async def test_max_prefill_tokens_limits_what_a_step_takes_in(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, chunk: int
) -> None:
    engine = make_engine(max_prefill_tokens=20, chunked_prefill_size=chunk)
    with caplog.at_level("INFO", logger="treadle"):
        await engine.generate(
            [[number] * 12 for number in range(6)], SamplingParams(2, ignore_eos=True)
        )
    lines = [r.getMessage() for r in caplog.records if "Prefill batch" in r.getMessage()]
    taken = [int(line.split("#new-seq: ")[1].split(",")[0]) for line in lines]
    assert sum(taken) == 6 and max(taken) <= 2


async def test_oldest_request_is_never_retracted(make_engine: MakeEngine) -> None:
    engine = make_engine(small_pool(1, 700), schedule_conservativeness=0.01)
    rng = random.Random(3)
    answers = await engine.generate(
        [[rng.randrange(256) for _ in range(30)] for _ in range(10)], SamplingParams(400)
    )
    assert answers[0].num_retractions == 0
    assert sum(a.num_retractions for a in answers) > 0


async def test_aborts_under_pressure_leave_the_others_whole(make_engine: MakeEngine) -> None:
    engine = make_engine(small_pool(4, 400), schedule_conservativeness=0.01)
    rng = random.Random(5)
    prompts = [[number] * 25 for number in range(10)]
    got = [watch(engine, prompt, SamplingParams(200)) for prompt in prompts]
    victims = set(rng.sample(range(10), 4))
    for turn in range(2000):
        await asyncio.sleep(0)
        if turn % 100 == 99 and victims:
            engine.abort(got[victims.pop()][0].request_id if got[0] else "nobody")
    for prompt, deltas in zip(prompts, got, strict=True):
        last = await ended(deltas)
        tokens = [t for d in deltas for t in d.token_ids]
        assert tokens == expected_tokens(prompt, len(tokens), without_end)
        assert last.finish_reason is not None
        assert last.finish_reason.type == "abort" or len(tokens) == 200


@pytest.mark.parametrize("wanted", [1, 64, 10**6, None])
async def test_context_edge(make_engine: MakeEngine, wanted: int | None) -> None:
    engine = make_engine(small_pool(1, 4096, max_model_len=64))
    for length in (62, 63):
        answer = await engine.generate([3] * length, SamplingParams(wanted))
        assert answer.finish_reason.type == "length"
        assert answer.completion_tokens == min(wanted or 64, 64 - length)
    for length in (64, 65, 640):
        with pytest.raises(InvalidRequest, match=f"has {length} tokens, at most 63 fit"):
            await engine.generate([3] * length, SamplingParams(wanted))


async def test_full_queue_refuses_and_says_how_full(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running_requests=1, max_queued_requests=2)
    running = watch(engine, [1], SamplingParams(100, ignore_eos=True))
    while not running:
        await asyncio.sleep(0)
    waiting = [watch(engine, [2], SamplingParams(5)) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait already"):
        watch(engine, [3], SamplingParams(5))
    with pytest.raises(QueueFull):
        await engine.generate([3], SamplingParams(5, n=3))
    for got in [running, *waiting]:
        assert (await ended(got)).finish_reason is not None
    assert (await engine.generate([3], SamplingParams(5))).completion_tokens
    engine.scheduler.check_integrity()


async def test_full_queue_drops_its_least_important_for_a_better_one(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(
        max_running_requests=1, max_queued_requests=2, enable_priority_scheduling=True,
        disable_priority_preemption=True,
    )  # fmt: skip
    first = watch(engine, [1], SamplingParams(100, ignore_eos=True), priority=9)
    while not first:
        await asyncio.sleep(0)
    low = watch(engine, [2], SamplingParams(5), priority=1)
    middle = watch(engine, [2], SamplingParams(5), priority=2)
    high = watch(engine, [2], SamplingParams(5), priority=3)
    reason = (await ended(low)).finish_reason
    assert reason is not None and reason.type == "abort" and reason.status_code == 503
    with pytest.raises(QueueFull):
        watch(engine, [2], SamplingParams(5), priority=2)
    for got in (middle, high):
        reason = (await ended(got)).finish_reason
        assert reason is not None and reason.type != "abort"


@pytest.mark.parametrize("low_first", [False, True])
async def test_more_important_request_takes_a_running_ones_place(
    make_engine: MakeEngine, low_first: bool
) -> None:
    sign = -1 if low_first else 1
    engine = make_engine(
        max_running_requests=2, enable_priority_scheduling=True,
        schedule_low_priority_values_first=low_first,
    )  # fmt: skip
    slow = [
        watch(engine, [n], SamplingParams(300, ignore_eos=True), priority=sign * 5) for n in (1, 2)
    ]
    while not all(slow):
        await asyncio.sleep(0)
    near = watch(engine, [3], SamplingParams(3, ignore_eos=True), priority=sign * 15)
    far = watch(engine, [4], SamplingParams(3, ignore_eos=True), priority=sign * 16)
    await ended(far)
    assert not near, "it beats them by the threshold, not by more"
    ends = [await ended(got) for got in slow]
    assert sorted(end.num_retractions for end in ends) == [0, 1], "the newest gives way"
    assert ends[1].num_retractions == 1
    await ended(near)
    for number, got in enumerate(slow, start=1):
        assert [t for d in got for t in d.token_ids] == expected_tokens([number], 300)


async def test_equal_priorities_never_preempt_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine(
        max_running_requests=1,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=0,
    )
    got = [watch(engine, [n], SamplingParams(20, ignore_eos=True), priority=7) for n in range(5)]
    assert [(await ended(g)).num_retractions for g in got] == [0] * 5


async def test_flush_waits_for_idle_and_forgets(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(50))
    await engine.generate(prompt, SamplingParams(4, ignore_eos=True))
    assert await engine.flush_cache() == 52  # 54 tokens, the last without KV, in pages of 4
    got = watch(engine, prompt, SamplingParams(200, ignore_eos=True))
    with pytest.raises(NotIdle, match="1 requests run|1 wait"):
        await engine.flush_cache()
    first, second = await asyncio.gather(
        engine.flush_cache(timeout=20), engine.flush_cache(timeout=20)
    )
    assert (await ended(got)).cached_tokens == 0
    assert sorted((first, second)) == [0, 248]


async def test_chunk_cache_shares_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(disable_radix_cache=True)
    for _ in range(2):
        answer = await engine.generate(list(range(50)), SamplingParams(4, ignore_eos=True))
        assert answer.cached_tokens == 0
    assert await engine.flush_cache() == 0


async def test_lost_page_is_found_at_idle_and_the_server_lives_on(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    prompt = list(range(50))
    await engine.generate(prompt, SamplingParams(4, ignore_eos=True))
    (pool,) = engine.scheduler.pages.pools.values()
    pool.allocate(3)
    answer = await engine.generate(prompt, SamplingParams(4, ignore_eos=True))
    assert answer.token_ids == expected_tokens(prompt, 4)
    await engine.is_healthy()
    assert "KV pages were lost" in caplog.text
    engine.scheduler.check_integrity()
    answer = await engine.generate(prompt, SamplingParams(4, ignore_eos=True))
    assert answer.token_ids == expected_tokens(prompt, 4)


async def test_engine_is_healthy_while_a_step_takes_long(make_engine: MakeEngine) -> None:
    executor = FakeExecutor(capacity(), depth=1, delay_turns=lambda: 20_000)
    engine = make_engine(executor)
    got = watch(engine, [1, 2, 3], SamplingParams(1, ignore_eos=True))
    await asyncio.sleep(0.01)
    for _ in range(5):
        assert await engine.is_healthy(timeout=0.01)
        assert not got, "the step still runs"
    await ended(got)
