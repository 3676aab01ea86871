"""Whatever the prefix cache holds, a request's tokens and logits are those of a cold engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_engine import Machine, Recorder

from treadle.engine import Engine, RequestOptions, RequestOutput, SamplingParams
from treadle.tools.tiny_model import make_folder

COUNT = 6
GREEDY = SamplingParams(COUNT, temperature=0, ignore_eos=True)


SHAPES = [  # ranks, page size, whether there are graphs
    pytest.param((1, 1, False), id="page 1"),
    pytest.param((1, 16, False), id="page 16"),
    pytest.param((1, 64, False), id="page 64"),
    pytest.param((1, 16, True), id="graphs, page 16"),
    pytest.param((2, 1, False), id="2 ranks, page 1"),
    pytest.param((2, 16, True), id="2 ranks, graphs, page 16"),
    pytest.param((2, 64, False), id="2 ranks, page 64", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    overrides = {"num_hidden_layers": 2}
    return make_folder(tmp_path_factory.mktemp("model"), overrides=overrides)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Machine]:
    """One rank without graphs: what all others are compared with."""
    machine = Machine(folder)
    yield machine
    asyncio.run(machine.close())


@pytest.fixture(scope="module", params=SHAPES)
def machine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Machine]:
    ranks, page_size, has_graphs = request.param
    machine = Machine(folder, ranks, page_size=page_size, has_graphs=has_graphs)
    yield machine
    asyncio.run(machine.close())


async def cold_answer(alone: Machine, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    async with Engine(alone.parts(disable_radix_cache=True)) as engine:
        tokens, logits, cached = await answer(engine, alone.recorder, prompt)
    assert cached == 0
    return tokens, logits


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
    """As far as found goes: of several ranks it is the first one's part of the vocabulary."""
    expected = expected[:, : found.shape[1]]
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


async def after_retraction(engine: Engine, prompt: list[int], page_size: int) -> None:
    """Fills the pool with requests of the same prompt until some have been retracted."""
    params = SamplingParams(max(64, 3 * page_size), temperature=1.0)  # other draws each time
    for _ in range(20):
        answers = await engine.generate([[*prompt, other] for other in range(12)], params)
        if any(answer.num_retractions for answer in answers):
            return
    raise AssertionError("no request was ever retracted")


async def after_flush(engine: Engine, prompt: list[int]) -> None:
    await engine.generate(prompt, GREEDY)
    assert await engine.flush_cache() > 0 or len(prompt) + COUNT < 64


Before = Callable[[Engine, list[int]], Awaitable[None]]


@pytest.mark.parametrize("extra", [-1, 0, 1, "twice"])
@pytest.mark.parametrize("before", [warm, half_warm, after_abort, after_flush])
async def test_tokens_and_logits_do_not_depend_on_what_is_cached(
    alone: Machine, machine: Machine, extra: int | str, before: Before
) -> None:
    page_size = machine.page_size
    base = max(page_size, 16)
    length = 2 * base if extra == "twice" else base + int(extra)
    prompt = [random.randrange(256) for _ in range(length)]
    expected, expected_logits = await cold_answer(alone, prompt)
    async with Engine(machine.parts(chunked_prefill_size=7)) as engine:
        await before(engine, prompt)
        for _ in range(2):  # the second time everything is cached
            tokens, logits, cached = await answer(engine, machine.recorder, prompt)
            assert tokens == expected
            assert_close(logits, expected_logits)
        assert cached == (length - 1) // page_size * page_size
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("admission", ["observed", "sglang"])
async def test_retraction_changes_no_token(
    alone: Machine, machine: Machine, admission: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = [random.randrange(256) for _ in range(40)]
    expected, expected_logits = await cold_answer(alone, prompt)
    tokens = 12 * max(machine.page_size, 32)  # fewer than a dozen requests need
    parts = machine.parts(
        tokens=tokens, admission=admission, schedule_conservativeness=0.01, random_seed=5
    )
    async with Engine(parts) as engine:
        await after_retraction(engine, prompt, machine.page_size)
        assert "KV cache pool is full. Retract requests. #retracted_reqs: " in caplog.text
        found, logits, _ = await answer(engine, machine.recorder, prompt)
        assert found == expected
        assert_close(logits, expected_logits)
    engine.scheduler.check_integrity()


async def test_namespaces_share_nothing(alone: Machine) -> None:
    prompt = list(range(64))
    options = [
        RequestOptions(),
        RequestOptions(extra_key="a"),
        RequestOptions(cache_salt="a"),
        RequestOptions(extra_key="a", cache_salt="a"),
    ]
    async with Engine(alone.parts()) as engine:
        for expected in (0, 60):
            for option in options:
                got: list[RequestOutput] = []
                engine.submit(prompt, GREEDY, got.append, options=option)
                while not got or got[-1].finish_reason is None:
                    await asyncio.sleep(0)
                assert got[-1].cached_tokens == expected
