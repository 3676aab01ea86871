"""The loop over a fake executor that checks every page: any depth, any order of events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from fake_engine import EOS, VOCAB, capacity, expected_tokens, make_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.engine import (
    Engine,
    InvalidRequest,
    NotIdle,
    RequestOptions,
    RequestOutput,
    SamplingParams,
)
from treadle.graphs.fake import FakeExecutor, default_token
from treadle.graphs.step import KvGroup

MakeEngine = Callable[..., Engine]
FULL = KvGroup("full", 4, 64, 64)
WINDOWED = KvGroup("window", 4, 64, 64, window=10, kind="window")


def quiet(count: int, **more: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 5, 512])
async def test_tokens_do_not_depend_on_depth_pages_or_chunks(
    make_engine: MakeEngine, depth: int, page_size: int, chunk: int
) -> None:
    group = KvGroup("full", page_size, 512 // page_size, 64)
    executor = FakeExecutor(capacity(group, max_model_len=128), depth=depth)
    engine = make_engine(executor, chunked_prefill_size=chunk)
    prompts = [[length, *range(length)] for length in (0, 4, 15, 16, 17, 40)]
    answers = await engine.generate(prompts, quiet(12))
    assert [a.token_ids for a in answers] == [expected_tokens(p, 12) for p in prompts]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_end_token_never_lets_the_extra_token_out(
    make_engine: MakeEngine, depth: int
) -> None:
    def ends_after_six(prefix: int, length: int, vocab: int) -> int:
        return EOS if length == 9 else default_token(prefix, length, 250)

    executor = FakeExecutor(capacity(), depth=depth, token_function=ends_after_six)
    answer = await make_engine(executor).generate([7, 8, 9], SamplingParams(max_new_tokens=50))
    assert answer.token_ids[-1] == EOS and len(answer.token_ids) == 7
    assert answer.completion_tokens == 7
    assert answer.finish_reason.type == "stop" and answer.finish_reason.matched == EOS
    assert len(answer.text.encode()) >= 6


async def test_row_that_must_end_by_length_is_not_planned_again(make_engine: MakeEngine) -> None:
    executor = FakeExecutor(capacity(), depth=3)
    await make_engine(executor).generate([1, 2, 3], quiet(5))
    assert executor.num_steps == 5  # the prefill samples the first token


async def test_max_new_tokens_zero_computes_nothing(make_engine: MakeEngine) -> None:
    executor = FakeExecutor(capacity())
    answer = await make_engine(executor).generate([1, 2], quiet(0))
    assert (answer.token_ids, answer.text, answer.prompt_tokens) == ([], "", 2)
    assert answer.finish_reason.type == "length" and executor.num_steps == 0


async def test_big_max_new_tokens_is_clamped_to_the_context(make_engine: MakeEngine) -> None:
    engine = make_engine(FakeExecutor(capacity(max_model_len=32)))
    for wanted in (None, 10**6):
        answer = await engine.generate(list(range(31)), SamplingParams(wanted, ignore_eos=True))
        assert len(answer.token_ids) == 1 and answer.finish_reason.type == "length"


async def test_worst_cases_wait_for_pages_instead_of_running_out(make_engine: MakeEngine) -> None:
    group = KvGroup("full", 4, 10, 64)
    executor = FakeExecutor(capacity(group, max_model_len=40))
    engine = make_engine(executor)
    prompts = [[i] * 8 for i in range(12)]
    answers = await engine.generate(prompts, quiet(20))
    assert [a.token_ids for a in answers] == [expected_tokens(p, 20) for p in prompts]


async def test_max_running_requests_holds(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running_requests=3)
    seen = []

    def sink(delta: RequestOutput) -> None:
        seen.append(engine.load().num_running_reqs)

    for _ in range(9):
        engine.submit([1, 2, 3], quiet(6), sink)
    await engine.shutdown(drain_s=10)
    assert max(seen) == 3 and len(seen) == 9 * 6


async def test_abort_reaches_waiting_and_running_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running_requests=1)
    deltas: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    for rid, got in deltas.items():
        engine.submit([1, 2], quiet(400), got.append, request_id=rid)
    while not deltas["a"]:
        await asyncio.sleep(0)
    engine.abort("b")
    engine.abort("a")
    engine.abort("a")
    engine.abort("nobody")
    while engine.load().num_running_reqs or not deltas["b"]:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    for got in deltas.values():
        reasons = [d.finish_reason.type for d in got if d.finish_reason is not None]
        assert reasons == ["abort"] and got[-1].finish_reason is not None
    generated = [t for d in deltas["a"] for t in d.token_ids]
    assert generated == expected_tokens([1, 2], len(generated))
    assert deltas["b"][0].completion_tokens == 0


async def test_leaving_a_stream_aborts_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream([1, 2], quiet(400))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    while engine.load().num_running_reqs:
        await asyncio.sleep(0)


async def test_cancelling_generate_aborts_its_batch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    task = asyncio.create_task(engine.generate([[1], [2], [3]], quiet(400)))
    while not engine.load().num_running_reqs:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while engine.load().num_running_reqs:
        await asyncio.sleep(0)


async def test_raising_sink_aborts_only_its_own_request(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()

    def broken(delta: RequestOutput) -> None:
        raise RuntimeError("the receiver is broken")

    engine.submit([1, 2], quiet(400), broken)
    answer = await engine.generate([5, 6], quiet(30))
    assert answer.token_ids == expected_tokens([5, 6], 30)
    assert engine.load().num_running_reqs == 0
    assert "the receiver is broken" in caplog.text


async def test_failed_step_fails_its_requests_and_the_loop_goes_on(
    make_engine: MakeEngine,
) -> None:
    executor = FakeExecutor(capacity())
    engine = make_engine(executor)
    executor.fail_next = ValueError("out of registers")
    answer = await engine.generate([1, 2], quiet(10))
    assert answer.finish_reason.type == "abort" and answer.finish_reason.status_code == 500
    assert "out of registers" in answer.finish_reason.message
    answer = await engine.generate([1, 2], quiet(10))
    assert answer.token_ids == expected_tokens([1, 2], 10)
    assert await engine.is_healthy()


async def test_lost_device_ends_everything_and_says_so(make_engine: MakeEngine) -> None:
    executor = FakeExecutor(capacity())
    engine = make_engine(executor, max_running_requests=1)
    both = asyncio.gather(engine.generate([1], quiet(300)), engine.generate([2], quiet(300)))
    while not engine.load().num_running_reqs:
        await asyncio.sleep(0)
    executor.is_lost = True
    for answer in await both:
        assert answer.finish_reason.type == "abort"
    assert not engine.is_ready and not await engine.is_healthy()


async def test_same_id_twice_is_refused_while_it_runs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit([1], quiet(50), lambda delta: None, request_id="x")
    with pytest.raises(InvalidRequest, match="'x' is running"):
        engine.submit([1], quiet(50), lambda delta: None, request_id="x")
    await engine.shutdown(drain_s=10)


async def test_choices_of_a_request_come_with_their_own_end(make_engine: MakeEngine) -> None:
    answers = await make_engine().generate([3, 4], quiet(8, n=3))
    assert [a.index for a in answers] == [0, 1, 2]
    assert len({a.request_id for a in answers}) == 1
    assert all(a.token_ids == expected_tokens([3, 4], 8) for a in answers)


async def test_stream_interval_joins_deltas_after_the_first(make_engine: MakeEngine) -> None:
    deltas = [d async for d in make_engine().stream([1, 2], quiet(12, stream_interval=5))]
    assert [len(d.token_ids) for d in deltas] == [1, 5, 5, 1]
    assert [t for d in deltas for t in d.token_ids] == expected_tokens([1, 2], 12)


def without_end(prefix: int, length: int, vocab_size: int) -> int:
    return default_token(prefix, length, EOS)


class Story:
    """A random sequence of events against one engine, with what must come out of it."""

    def __init__(self, seed: int, depth: int, groups: tuple[KvGroup, ...], **flags: object) -> None:
        self.rng = random.Random(seed)
        delay = random.Random(seed + 1)
        executor = FakeExecutor(
            capacity(*groups, slots=6, max_model_len=80),
            depth=depth,
            token_function=without_end,
            delay_turns=lambda: delay.randint(0, 3),
        )
        chunk = self.rng.choice([1, 3, 7, 64])
        self.engine = Engine(make_parts(executor, chunked_prefill_size=chunk, **flags))
        self.stems = [self.tokens_of(self.rng.randint(1, 60)) for _ in range(3)]
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.aborted: set[str] = set()
        self.num_retractions = 0
        self.num_cached_tokens = 0

    def tokens_of(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    async def run(self, events: int) -> None:
        for number in range(events):
            choice = self.rng.random()
            if choice < 0.5:
                self.submit(f"r{number}")
            elif choice < 0.65 and self.prompts:
                self.aborted.add(rid := self.rng.choice(list(self.prompts)))
                self.engine.abort(rid)
            elif choice < 0.7:
                with suppress(NotIdle):
                    await self.engine.flush_cache(timeout=self.rng.choice([0, 0.01]))
            for _ in range(self.rng.randint(0, 6)):
                await asyncio.sleep(0)
        await self.engine.shutdown(drain_s=30)
        self.engine.scheduler.check_integrity()
        for rid, prompt in self.prompts.items():
            assert len(self.ends[rid]) == 1, f"{rid} ended {self.ends[rid]}"
            assert self.ends[rid] == ["length"] or rid in self.aborted, "a step failed"
            expected = expected_tokens(prompt, len(self.tokens[rid]), without_end)
            assert self.tokens[rid] == expected, rid

    def submit(self, rid: str) -> None:
        stem = self.rng.choice(self.stems)
        prompt = stem[: self.rng.randint(0, len(stem))] + self.tokens_of(self.rng.randint(1, 8))
        self.prompts[rid] = prompt
        tokens, ends = self.tokens.setdefault(rid, []), self.ends.setdefault(rid, [])

        def sink(delta: RequestOutput) -> None:
            assert not ends, "a delta after the last"
            tokens.extend(delta.token_ids)
            assert delta.completion_tokens == len(tokens)
            assert 0 <= delta.cached_tokens < delta.prompt_tokens == len(prompt)
            if delta.finish_reason is not None:
                ends.append(delta.finish_reason.type)
                self.num_retractions += delta.num_retractions
                self.num_cached_tokens += delta.cached_tokens

        params = SamplingParams(self.rng.randint(1, 50), ignore_eos=self.rng.random() < 0.3)
        options = RequestOptions(
            priority=self.rng.choice([None, 0, 5, 40]), extra_key=self.rng.choice([None, None, "x"])
        )
        self.engine.submit(prompt, params, sink, request_id=rid, options=options)


TIGHT = KvGroup("full", 4, 24, 64)  # 96 tokens for requests of up to 80
FINE = KvGroup("full", 1, 100, 64)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(FULL,), (FULL, WINDOWED), (TIGHT,), (FINE,)]),
    st.fixed_dictionaries(
        {},
        optional={
            "disable_radix_cache": st.booleans(),
            "admission": st.sampled_from(["observed", "sglang"]),
            "enable_priority_scheduling": st.booleans(),
            "schedule_policy": st.sampled_from(
                ["fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key"]
            ),
            "schedule_conservativeness": st.sampled_from([0.01, 1.0]),
            "num_continuous_decode_steps": st.sampled_from([1, 3]),
            "disable_overlap_schedule": st.booleans(),
            "prefill_max_requests": st.sampled_from([None, 1]),
        },
    ),
)
def test_random_schedules_lose_no_token_and_no_page(
    seed: int, depth: int, groups: tuple[KvGroup, ...], flags: dict[str, object]
) -> None:
    async def tell() -> None:
        await Story(seed, depth, groups, **flags).run(events=25)

    asyncio.run(tell())


@pytest.mark.parametrize("admission", ["observed", "sglang"])
def test_stories_do_retract_and_do_share(admission: str) -> None:
    async def tell(seed: int) -> Story:
        story = Story(seed, 2, (TIGHT,), admission=admission, schedule_conservativeness=0.01)
        await story.run(events=40)
        return story

    stories = [asyncio.run(tell(seed)) for seed in range(12)]
    assert sum(s.num_retractions for s in stories) > 10
    assert sum(s.num_cached_tokens for s in stories) > 100
