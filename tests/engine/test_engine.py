"""Text, stops and checks through the whole engine on a fake executor that spells what we choose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import EOS, VOCAB, capacity, make_parts

from treadle.engine import Engine, EngineClosed, InvalidRequest, SamplingParams
from treadle.graphs.fake import FakeExecutor
from treadle.graphs.step import KvGroup

MakeEngine = Callable[..., Engine]
PROMPT = [1, 2, 3]


def speller(text: str, then: int = EOS, depth: int = 2) -> FakeExecutor:
    """Generates the bytes of a text after PROMPT, then one token for ever."""
    spelled = text.encode()

    def token(prefix: int, length: int, vocab: int) -> int:
        place = length - len(PROMPT)
        return spelled[place] if place < len(spelled) else then

    return FakeExecutor(capacity(), depth=depth, token_function=token)


async def folded(engine: Engine, params: dict[str, Any]) -> tuple[str, Any, list[str]]:
    deltas = [d async for d in engine.stream(PROMPT, params)]
    answer = await engine.generate(PROMPT, params)
    assert answer.text == "".join(d.text for d in deltas)
    assert answer.token_ids == [t for d in deltas for t in d.token_ids]
    assert answer.completion_tokens == len(answer.token_ids) == deltas[-1].completion_tokens
    assert answer.finish_reason == deltas[-1].finish_reason
    return answer.text, answer.finish_reason, [d.text for d in deltas]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_text_ends_before_the_end_token(make_engine: MakeEngine, depth: int) -> None:
    engine = make_engine(speller("naïve 🦙 日本", depth=depth))
    text, reason, parts = await folded(engine, {"max_new_tokens": 100})
    assert text == "naïve 🦙 日本"
    assert (reason.type, reason.matched) == ("stop", EOS)
    assert "\ufffd" not in "".join(parts)


async def test_character_cut_by_length_ends_in_one_replacement(make_engine: MakeEngine) -> None:
    text, reason, _ = await folded(make_engine(speller("ab🦙")), {"max_new_tokens": 4})
    assert text == "ab\ufffd" and reason.type == "length"


@pytest.mark.parametrize("keep", [False, True])
async def test_stop_string_across_tokens(make_engine: MakeEngine, keep: bool) -> None:
    engine = make_engine(speller("The quick brown fox jumps"))
    text, reason, parts = await folded(
        engine, {"max_new_tokens": 100, "stop": ["own fox", "zzz"], "no_stop_trim": keep}
    )
    assert text == ("The quick brown fox" if keep else "The quick br")
    assert (reason.type, reason.matched) == ("stop", "own fox")
    assert "".join(parts[:12]) == "The quick br", "only what may become a stop is held back"


async def test_held_back_text_goes_out_at_the_end(make_engine: MakeEngine) -> None:
    engine = make_engine(speller("almost own fo"))
    text, reason, _ = await folded(engine, {"max_new_tokens": 100, "stop": "own fox"})
    assert text == "almost own fo" and reason.matched == EOS


async def test_stop_string_wins_over_the_length_in_the_same_token(make_engine: MakeEngine) -> None:
    engine = make_engine(speller("abc"))
    text, reason, _ = await folded(engine, {"max_new_tokens": 3, "stop": "bc"})
    assert text == "a" and (reason.type, reason.matched) == ("stop", "bc")


async def test_ignore_eos_still_honours_stop_strings(make_engine: MakeEngine) -> None:
    engine = make_engine(speller("abcd", then=ord("!")))
    params = {"max_new_tokens": 30, "ignore_eos": True, "stop": "!!", "stop_token_ids": [97]}
    text, reason, _ = await folded(engine, params)
    assert text == "abcd" and reason.matched == "!!"


@pytest.mark.parametrize("keep", [False, True])
async def test_stop_token_ids_end_and_are_trimmed(make_engine: MakeEngine, keep: bool) -> None:
    engine = make_engine(speller("hello world"))
    params = {"max_new_tokens": 30, "stop_token_ids": [ord(" ")], "no_stop_trim": keep}
    for stops in ([], ["zzz"]):
        text, reason, _ = await folded(engine, {**params, "stop": stops})
        assert text == ("hello " if keep else "hello")
        assert (reason.type, reason.matched) == ("stop", ord(" "))


@pytest.mark.parametrize("interval", [1, 3, 50])
async def test_any_stream_interval_gives_the_same_text(
    make_engine: MakeEngine, interval: int
) -> None:
    engine = make_engine(speller("日本語 and 🦙🦙 stop here"))
    params = {"max_new_tokens": 100, "stop": ["stop"], "stream_interval": interval}
    text, reason, _ = await folded(engine, params)
    assert text == "日本語 and 🦙🦙 " and reason.matched == "stop"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "at least one token"),
        ("", "at least one token"),
        ([-1], f"from 0 to {VOCAB - 1}"),
        ([1, VOCAB], "at position 1"),
        ([1.5], "got 1.5"),
        ([True], "got True"),
        (list(range(256)) * 2, "has 512 tokens, at most 511 fit"),
    ],
)
async def test_bad_prompts_are_refused(make_engine: MakeEngine, prompt: Any, said: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=said) as caught:
        await engine.generate([prompt], SamplingParams(4))
    assert caught.value.param == "prompt"
    assert (await engine.generate(PROMPT, SamplingParams(4))).completion_tokens


async def test_prompt_larger_than_the_pool_is_refused_with_its_numbers(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(FakeExecutor(capacity(KvGroup("full", 4, 5, 64))))
    with pytest.raises(InvalidRequest, match="has 20 tokens, at most 19 fit: .* pool holds 20"):
        await engine.generate([1] * 20, SamplingParams(4))
    answer = await engine.generate([1] * 19, SamplingParams(400, ignore_eos=True))
    assert answer.completion_tokens == 1 and answer.finish_reason.type == "length"


async def test_batch_takes_one_parameter_set_or_one_each(make_engine: MakeEngine) -> None:
    engine = make_engine()
    each = [SamplingParams(n, ignore_eos=True) for n in (1, 2, 3)]
    prompts: list[str | list[int]] = ["a", [1], "c"]
    answers = await engine.generate(prompts, each)
    assert [a.completion_tokens for a in answers] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="2 sampling parameters for 3 prompts"):
        await engine.generate(["a", "b", "c"], each[:2])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("wanted", [0, 1, 2, 5])
async def test_nothing_ends_an_answer_before_min_new_tokens(
    make_engine: MakeEngine, depth: int, wanted: int
) -> None:
    engine = make_engine(speller("", depth=depth))  # would end at once, and at every token
    params = {"max_new_tokens": 9, "min_new_tokens": wanted, "stop_token_ids": [EOS + 1]}
    answer = await engine.generate(PROMPT, params)
    assert answer.token_ids == [EOS + 2] * wanted + [EOS]
    assert answer.finish_reason.matched == EOS
    beside = await engine.generate([PROMPT, PROMPT], [params, {"max_new_tokens": 9}])
    assert [a.completion_tokens for a in beside] == [wanted + 1, 1]


async def test_large_batch_is_queued_in_pieces_and_answered_whole(make_engine: MakeEngine) -> None:
    params = SamplingParams(1, ignore_eos=True)  # the first are done before the last are queued
    answers = await make_engine().generate([[n % 250, n // 250] for n in range(300)], params)
    assert [a.completion_tokens for a in answers] == [1] * 300


async def test_shutdown_lets_running_requests_finish_and_takes_no_more() -> None:
    engine = Engine(make_parts(FakeExecutor(capacity())))
    running = asyncio.create_task(engine.generate([1], SamplingParams(300, ignore_eos=True)))
    while not engine.load().num_running_reqs:
        await asyncio.sleep(0)
    closing = asyncio.create_task(engine.shutdown(drain_s=10))
    await asyncio.sleep(0)
    with pytest.raises(EngineClosed):
        engine.submit([1], SamplingParams(), lambda delta: None)
    assert (await running).completion_tokens == 300
    await closing
    await engine.shutdown()


async def test_shutdown_without_patience_aborts() -> None:
    engine = Engine(make_parts(FakeExecutor(capacity())))
    running = asyncio.create_task(engine.generate([1], SamplingParams(500, ignore_eos=True)))
    while not engine.load().num_running_reqs:
        await asyncio.sleep(0)
    await engine.shutdown()
    assert (await running).finish_reason.type == "abort"
    engine.scheduler.check_integrity()
