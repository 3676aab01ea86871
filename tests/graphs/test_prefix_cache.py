"""Whatever the prefix cache holds, a request's tokens and logits are those of a cold engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
import torch
from tiny_engine import Recorder, tiny_decoder, tiny_parts

from treadle.engine import Engine, RequestOptions, RequestOutput, SamplingParams
from treadle.graphs.models.decoder import Decoder

COUNT = 6
GREEDY = SamplingParams(COUNT, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


async def answer(
    engine: Engine, runner: Recorder, prompt: list[int]
) -> tuple[list[int], torch.Tensor, int]:
    """Tokens, the logits each was sampled from, and how many prompt tokens were cached."""
    runner.logits.clear()
    found = await engine.generate(prompt, GREEDY)
    by_length = dict(runner.logits)
    rows = [by_length[len(prompt) + place] for place in range(COUNT)]
    return found.token_ids, torch.stack(rows), found.cached_tokens


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    spread = expected.max() - expected.min()
    assert spread > 1
    assert (found - expected).abs().max() <= 1e-4 * spread


async def warm(engine: Engine, prompt: list[int]) -> None:
    await engine.generate(prompt, GREEDY)


async def half_warm(engine: Engine, prompt: list[int]) -> None:
    await engine.generate([*prompt[: len(prompt) // 2], 7, 8, 9], GREEDY)


async def after_abort(engine: Engine, prompt: list[int]) -> None:
    """Stops a request with the same prompt in its prefill, then one while it decodes."""
    for wanted in (0, 2):
        got: list[RequestOutput] = []
        rid = engine.submit(prompt, SamplingParams(200, ignore_eos=True), got.append)
        while len(got) < wanted:
            await asyncio.sleep(0)
        engine.abort(rid)
        while not got or got[-1].finish_reason is None:
            await asyncio.sleep(0)


async def after_retraction(engine: Engine, prompt: list[int]) -> None:
    """Fills the pool with requests of the same prompt until some have been retracted."""
    params = SamplingParams(190, temperature=1.0)  # other draws each time
    for _ in range(20):
        answers = await engine.generate([[*prompt, other] for other in range(12)], params)
        if any(answer.num_retractions for answer in answers):
            return
    raise AssertionError("no request was ever retracted")


async def after_flush(engine: Engine, prompt: list[int]) -> None:
    await engine.generate(prompt, GREEDY)
    assert await engine.flush_cache() > 0 or len(prompt) + COUNT < 64


Before = Callable[[Engine, list[int]], Awaitable[None]]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("extra", [-1, 0, 1, "twice"])
@pytest.mark.parametrize("before", [warm, half_warm, after_abort, after_flush])
async def test_tokens_and_logits_do_not_depend_on_what_is_cached(
    decoder: Decoder, page_size: int, extra: int | str, before: Before
) -> None:
    base = max(page_size, 16)
    length = 2 * base if extra == "twice" else base + int(extra)
    prompt = [random.randrange(256) for _ in range(length)]
    parts, cold_runner = tiny_parts(decoder, page_size=page_size, disable_radix_cache=True)
    async with Engine(parts) as cold:
        expected, expected_logits, cached = await answer(cold, cold_runner, prompt)
        assert cached == 0
    parts, runner = tiny_parts(decoder, page_size=page_size, chunked_prefill_size=7)
    async with Engine(parts) as engine:
        await before(engine, prompt)
        for _ in range(2):  # the second time everything is cached
            tokens, logits, cached = await answer(engine, runner, prompt)
            assert tokens == expected
            assert_close(logits, expected_logits)
        assert cached == (length - 1) // page_size * page_size
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("admission", ["observed", "sglang"])
async def test_retraction_changes_no_token(
    decoder: Decoder, page_size: int, admission: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = [random.randrange(256) for _ in range(40)]
    parts, cold_runner = tiny_parts(decoder, page_size=page_size, disable_radix_cache=True)
    async with Engine(parts) as cold:
        expected, expected_logits, _ = await answer(cold, cold_runner, prompt)
    parts, runner = tiny_parts(
        decoder, page_size=page_size, tokens=768, admission=admission,
        schedule_conservativeness=0.01, random_seed=5,
    )  # fmt: skip
    async with Engine(parts) as engine:
        await after_retraction(engine, prompt)
        assert "KV cache pool is full. Retract requests. #retracted_reqs: " in caplog.text
        tokens, logits, _ = await answer(engine, runner, prompt)
        assert tokens == expected
        assert_close(logits, expected_logits)
    engine.scheduler.check_integrity()


async def test_namespaces_share_nothing(decoder: Decoder) -> None:
    parts, _ = tiny_parts(decoder, page_size=4)
    prompt = list(range(64))
    options = [
        RequestOptions(),
        RequestOptions(extra_key="a"),
        RequestOptions(cache_salt="a"),
        RequestOptions(extra_key="a", cache_salt="a"),
    ]
    async with Engine(parts) as engine:
        for expected in (0, 60):
            for option in options:
                got: list[RequestOutput] = []
                engine.submit(prompt, GREEDY, got.append, options=option)
                while not got or got[-1].finish_reason is None:
                    await asyncio.sleep(0)
                assert got[-1].cached_tokens == expected
