"""Memory that goes and comes back under running requests, and a device that does not come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, combinations
from typing import Any

import pytest
from fake_engine import EOS, capacity, expected_tokens, make_parts

from treadle.engine import (
    Engine,
    EngineClosed,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    SyncEngine,
)
from treadle.engine import loop as loop_module
from treadle.graphs.fake import FakeExecutor, default_token
from treadle.graphs.step import MEMORY_TAGS, KvGroup

MakeEngine = Callable[..., Engine]
SUBSETS = list(chain.from_iterable(combinations(MEMORY_TAGS, size) for size in (1, 2, 3)))


def without_end(prefix: int, length: int, vocab_size: int) -> int:
    return default_token(prefix, length, EOS)


def fake(depth: int = 2, **more: Any) -> FakeExecutor:
    return FakeExecutor(capacity(), depth=depth, token_function=without_end, **more)


def quiet(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0, ignore_eos=True, **more)


def prompts(count: int) -> list[list[int]]:
    return [random.sample(range(250), random.randrange(1, 60)) for _ in range(count)]


class Watched:
    """A request and the deltas that have come of it."""

    def __init__(self, engine: Engine, prompt: list[int], count: int) -> None:
        self.prompt, self.count = prompt, count
        self.deltas: list[RequestOutput] = []
        self.id = engine.submit(prompt, quiet(count), self.deltas.append)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    async def end(self) -> RequestOutput:
        async with asyncio.timeout(10):
            while not self.deltas or self.deltas[-1].finish_reason is None:
                await asyncio.sleep(0)
        return self.deltas[-1]

    async def check(self) -> RequestOutput:
        last = await self.end()
        assert self.tokens == expected_tokens(self.prompt, self.count, without_end)
        return last


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("tags", [None, *SUBSETS])
@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_streams_stand_still_while_memory_is_away_and_lose_nothing(
    make_engine: MakeEngine, depth: int, tags: tuple[str, ...] | None
) -> None:
    executor = fake(depth, delay_turns=lambda: random.randrange(3))
    engine = make_engine(executor, chunked_prefill_size=16)
    running = [Watched(engine, prompt, random.randrange(40, 120)) for prompt in prompts(6)]
    await turns(random.randrange(10, 60))
    await engine.release_memory_occupation(tags)
    assert engine.released_memory == (tags or MEMORY_TAGS)
    assert executor.released == set(tags or MEMORY_TAGS)
    late = Watched(engine, [1, 2, 3], 20)
    await turns(20)  # what was computed before the release goes out
    before, steps = [watched.tokens for watched in running], executor.num_steps
    await turns(200)
    assert [watched.tokens for watched in running] == before
    assert executor.num_steps == steps and not late.deltas
    assert engine.is_ready and await engine.is_healthy()
    engine.scheduler.check_integrity()
    await engine.resume_memory_occupation(tags)
    assert engine.released_memory == ()
    lasts = [await watched.check() for watched in (*running, late)]
    loses_kv = "kv_cache" in (tags or MEMORY_TAGS)
    assert any(last.num_retractions for last in lasts) == loses_kv


@pytest.mark.parametrize("admission", ["observed", "sglang"])
async def test_windowed_groups_start_over_too(make_engine: MakeEngine, admission: str) -> None:
    groups = (KvGroup("full", 4, 64, 64), KvGroup("window", 4, 64, 64, window=10, kind="window"))
    executor = FakeExecutor(capacity(*groups, max_model_len=200), token_function=without_end)
    engine = make_engine(executor, admission=admission)
    running = [Watched(engine, prompt, 40) for prompt in prompts(3)]
    await turns(40)
    await engine.release_memory_occupation(["kv_cache"])
    engine.scheduler.check_integrity()
    assert engine.load().num_used_tokens == 0
    await engine.resume_memory_occupation()
    for watched in running:
        await watched.check()


async def test_only_lost_kv_empties_the_prefix_cache(make_engine: MakeEngine) -> None:
    engine = make_engine(fake())
    prompt = list(range(40))

    async def cached() -> int:
        return int((await engine.generate(prompt, quiet(2))).cached_tokens)

    assert (await cached(), await cached()) == (0, 36)
    await engine.release_memory_occupation(["weights", "cuda_graph"])
    await engine.resume_memory_occupation()
    assert await cached() == 36
    await engine.release_memory_occupation(["kv_cache"])
    await engine.resume_memory_occupation()
    assert (await cached(), await cached()) == (0, 36)


@pytest.mark.parametrize("tag", MEMORY_TAGS)
async def test_requests_end_by_abort_while_memory_is_away(
    make_engine: MakeEngine, tag: str
) -> None:
    engine = make_engine(fake(), max_running_requests=2)
    requests = [Watched(engine, prompt, 400) for prompt in prompts(4)]
    await turns(30)
    await engine.release_memory_occupation([tag])
    requests.append(Watched(engine, [9], 10))
    for watched in requests[1:]:
        engine.abort(watched.id)
    for watched in requests[1:]:
        reason = (await watched.end()).finish_reason
        assert reason is not None and reason.type == "abort"
    engine.scheduler.check_integrity()
    await engine.resume_memory_occupation([tag])
    await requests[0].check()


async def test_device_that_cannot_release_leaves_everything_as_it_was(
    make_engine: MakeEngine,
) -> None:
    executor = fake()
    engine = make_engine(executor)
    executor.can_release = False
    await engine.generate(list(range(40)), quiet(2))
    running = [Watched(engine, prompt, 80) for prompt in prompts(4)]
    await turns(20)
    with pytest.raises(InvalidRequest, match="--enable-memory-saver") as caught:
        await engine.release_memory_occupation()
    assert caught.value.param == "tags" and engine.released_memory == ()
    assert [(await w.check()).num_retractions for w in running] == [0, 0, 0, 0]
    assert (await engine.generate(list(range(40)), quiet(2))).cached_tokens == 36


@pytest.mark.parametrize("bad", [["weight"], ["weights", ""], ("kv_cache", "all"), "graphs"])
async def test_unknown_tag_is_refused_with_the_legal_ones(
    make_engine: MakeEngine, bad: Any
) -> None:
    engine = make_engine(fake())
    for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
        with pytest.raises(InvalidRequest, match="weights, kv_cache, cuda_graph") as caught:
            await call(bad)
        assert caught.value.param is not None and caught.value.param.startswith("tags[")
    assert engine.released_memory == ()


async def test_tags_go_and_come_one_by_one(make_engine: MakeEngine) -> None:
    executor = fake()
    engine = make_engine(executor)
    watched = Watched(engine, [1, 2, 3], 60)
    await turns(10)
    order = random.sample(MEMORY_TAGS, 3)
    for tag in order:
        await engine.release_memory_occupation(tag)
        await engine.release_memory_occupation([tag, tag])  # nothing more happens
    assert executor.released == set(MEMORY_TAGS)
    for tag in random.sample(MEMORY_TAGS, 3):
        await turns(50)
        assert watched.deltas[-1].finish_reason is None
        await engine.resume_memory_occupation([tag])
        await engine.resume_memory_occupation([tag])
    await watched.check()
    await engine.resume_memory_occupation()


async def test_retraction_happens_once_per_loss(make_engine: MakeEngine) -> None:
    engine = make_engine(fake())
    watched = Watched(engine, [1, 2, 3], 60)
    await turns(10)
    for _ in range(3):
        await engine.release_memory_occupation(["kv_cache"])
    await engine.resume_memory_occupation()
    assert (await watched.check()).num_retractions == 1


async def test_calls_from_many_sides_take_turns(make_engine: MakeEngine) -> None:
    executor = fake(delay_turns=lambda: random.randrange(3))
    engine = make_engine(executor)
    running = [Watched(engine, prompt, 150) for prompt in prompts(5)]

    async def one() -> None:
        for _ in range(6):
            tags = random.choice([None, *SUBSETS])
            await turns(random.randrange(30))
            await engine.release_memory_occupation(tags)
            await turns(random.randrange(5))
            await engine.resume_memory_occupation(tags)

    await asyncio.gather(*(one() for _ in range(4)))
    assert engine.released_memory == () and not executor.released
    for watched in running:
        await watched.check()


async def test_caller_who_leaves_half_way_leaves_a_whole_engine(make_engine: MakeEngine) -> None:
    for number in range(12):
        executor = fake(delay_turns=lambda: random.randrange(4))
        engine = make_engine(executor)
        watched = Watched(engine, [1, 2, 3], 60)
        await turns(10)
        call = asyncio.create_task(engine.release_memory_occupation())
        await turns(number)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        await engine.resume_memory_occupation()  # takes its turn after the release
        assert not executor.released
        await watched.check()


async def test_failed_resume_can_be_tried_again(make_engine: MakeEngine) -> None:
    executor = fake()
    engine = make_engine(executor)
    watched = Watched(engine, [1, 2, 3], 60)
    await turns(10)
    await engine.release_memory_occupation()
    executor.fail_memory = OSError("the checkpoint is gone")
    with pytest.raises(OSError, match="checkpoint"):
        await engine.resume_memory_occupation()
    assert engine.released_memory == MEMORY_TAGS and engine.is_ready
    await engine.resume_memory_occupation()
    await watched.check()


@pytest.mark.parametrize("tags", [None, ["weights"]])
async def test_engine_shuts_down_while_memory_is_away(
    make_engine: MakeEngine, tags: list[str] | None
) -> None:
    engine = make_engine(fake())
    running = [Watched(engine, prompt, 80) for prompt in prompts(3)]
    await turns(20)
    await engine.release_memory_occupation(tags)
    running.append(Watched(engine, [5], 5))
    await asyncio.wait_for(engine.shutdown(), 5)
    for watched in running:
        reason = (await watched.end()).finish_reason
        assert reason is not None and reason.type == "abort"
    for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
        with pytest.raises(EngineClosed):
            await call()


async def test_shutdown_waits_for_a_release_under_way(make_engine: MakeEngine) -> None:
    executor = fake(delay_turns=lambda: 3)
    engine = make_engine(executor)
    Watched(engine, [1, 2], 80)
    await turns(10)
    call = asyncio.create_task(engine.release_memory_occupation())
    await turns(2)
    await asyncio.wait_for(engine.shutdown(), 5)
    with suppress(EngineClosed):
        await call


async def test_flush_finds_nothing_after_lost_kv(make_engine: MakeEngine) -> None:
    engine = make_engine(fake())
    await engine.generate(list(range(40)), quiet(2))
    await engine.release_memory_occupation(["kv_cache"])
    assert await engine.flush_cache() == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_lost_device_ends_every_request_with_503(make_engine: MakeEngine, depth: int) -> None:
    executor = fake(depth)
    engine = make_engine(executor, max_running_requests=2)
    requests = [Watched(engine, prompt, 400) for prompt in prompts(5)]
    await turns(30)
    assert not engine.lost.is_set()
    executor.is_lost, executor.fail_next = True, RuntimeError("an illegal memory access")
    for watched in requests:
        reason = (await watched.end()).finish_reason
        assert reason is not None and reason.status_code in (500, 503)
    assert {d.finish_reason.status_code for w in requests[2:] if (d := w.deltas[-1]).finish_reason
            } == {503}  # fmt: skip
    assert engine.lost.is_set() and not engine.is_ready and not await engine.is_healthy()
    with pytest.raises(EngineClosed, match="the device is lost"):
        Watched(engine, [1], 1)
    for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
        with pytest.raises(EngineClosed, match="the device is lost"):
            await call()


async def test_failed_step_of_a_living_device_ends_its_requests_only(
    make_engine: MakeEngine,
) -> None:
    executor = fake()
    engine = make_engine(executor, max_running_requests=2)
    requests = [Watched(engine, prompt, 60) for prompt in prompts(4)]
    await turns(20)
    executor.fail_next = RuntimeError("one bad step")
    for watched in requests[:2]:
        reason = (await watched.end()).finish_reason
        assert reason is not None and reason.status_code == 500
    for watched in requests[2:]:
        await watched.check()
    assert engine.is_ready and not engine.lost.is_set()


@pytest.mark.parametrize("released", [False, True])
async def test_loss_is_noticed_without_a_step(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    monkeypatch.setattr(loop_module, "WATCH_S", 0.01)
    executor = fake()
    engine = make_engine(executor)
    await engine.generate([1, 2], quiet(2))
    requests = []
    if released:
        await engine.release_memory_occupation()
        requests = [Watched(engine, prompt, 10) for prompt in prompts(3)]
    executor.is_lost = True
    assert not await engine.is_healthy()
    await asyncio.wait_for(engine.lost.wait(), 10)
    for watched in requests:
        reason = (await watched.end()).finish_reason
        assert reason is not None and reason.status_code == 503


async def test_release_that_finds_the_device_lost_says_so(make_engine: MakeEngine) -> None:
    executor = fake()
    engine = make_engine(executor)
    watched = Watched(engine, [1, 2], 200)
    await turns(20)

    async def release(tags: Any) -> None:
        executor.is_lost = True
        raise RuntimeError("an illegal memory access")

    executor.release = release  # type: ignore[method-assign]
    with pytest.raises(EngineClosed, match="an illegal memory access"):
        await engine.release_memory_occupation()
    reason = (await watched.end()).finish_reason
    assert reason is not None and reason.status_code == 503 and engine.lost.is_set()


async def test_random_aborts_releases_and_resumes_lose_no_page(make_engine: MakeEngine) -> None:
    group = KvGroup("full", 4, 128, 64)
    executor = FakeExecutor(
        capacity(group, max_model_len=256), depth=3, token_function=without_end,
        delay_turns=lambda: random.randrange(3),
    )  # fmt: skip
    engine = make_engine(executor, chunked_prefill_size=24)
    running: list[Watched] = []
    aborted: set[str] = set()
    for _ in range(300):
        action = random.choices(["submit", "abort", "release", "resume"], [5, 1, 1, 2])[0]
        tags = random.choice([None, *SUBSETS])
        if action == "submit" and len(running) < 60:
            running.append(Watched(engine, random.choice(prompts(3)), random.randrange(1, 60)))
        elif action == "abort" and running:
            chosen = random.choice(running)
            engine.abort(chosen.id)
            aborted.add(chosen.id)
        elif action == "release":
            await engine.release_memory_occupation(tags)
        elif action == "resume":
            await engine.resume_memory_occupation(tags)
        await turns(random.randrange(6))
        engine.scheduler.check_integrity()
    await engine.resume_memory_occupation()
    for watched in running:
        await (watched.end() if watched.id in aborted else watched.check())


def test_sync_engine_releases_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = fake()

    async def create(**flags: Any) -> Engine:
        return Engine(make_parts(executor, **flags))

    monkeypatch.setattr(Engine, "create", create)
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    with SyncEngine() as engine:
        before = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
        engine.release_memory_occupation(["weights"])
        assert executor.released == {"weights"}
        with pytest.raises(InvalidRequest, match="kv_cache"):
            engine.resume_memory_occupation(["kv"])
        engine.resume_memory_occupation()
        after = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    assert (
        before["output_ids"] == after["output_ids"] == expected_tokens([1, 2, 3], 12, without_end)
    )
