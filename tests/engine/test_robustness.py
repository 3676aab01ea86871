"""What an embedded engine must survive: full queues, broken turns, wrong types, late calls."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import capacity, expected_tokens, make_parts

from treadle.engine import Engine, EngineClosed, InvalidRequest, SamplingParams
from treadle.engine.errors import QueueFull
from treadle.graphs.fake import FakeExecutor

MakeEngine = Callable[..., Engine]
PROMPT = [5, 6, 7]


async def test_request_that_overfills_an_idle_queue_leaves_nothing_behind(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_queued_requests=3)
    await engine.generate(PROMPT, {"max_new_tokens": 2})
    await asyncio.sleep(0.02)  # the loop sleeps
    with pytest.raises(QueueFull):
        await engine.generate(PROMPT, {"max_new_tokens": 2, "n": 5})
    for _ in range(200):
        if not engine.load().num_waiting_reqs:
            break
        await asyncio.sleep(0.005)
    assert engine.load().num_waiting_reqs == 0
    answer = await asyncio.wait_for(
        engine.generate(PROMPT, {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}), 5
    )
    assert answer.token_ids == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_engine_serves_on_after_a_turn_that_raised_while_planning(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    engine = make_engine(FakeExecutor(capacity(), depth=depth))
    planner = engine.scheduler._planner
    arrays, calls = planner._arrays, iter(range(1000))

    def fail_once(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("a bug")
        return arrays(*arguments)

    monkeypatch.setattr(planner, "_arrays", fail_once)
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    broken = await asyncio.wait_for(engine.generate(PROMPT, params), 5)
    assert broken.finish_reason is not None and broken.finish_reason.status_code == 500
    answer = await asyncio.wait_for(engine.generate(PROMPT, params), 5)
    assert answer.token_ids == expected_tokens(PROMPT, 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": None},
        {"temperature": "1"},
        {"temperature": True},
        {"n": 1.0},
        {"n": True},
        {"sampling_seed": 1.5},
        {"max_new_tokens": 1.5},
        {"stop_token_ids": None},
        {"stop_token_ids": (1.5,)},
        {"stop": (5,)},
        {"stream_interval": 2.5},
    ],
)
async def test_params_of_a_wrong_type_are_invalid_and_hurt_nobody(
    make_engine: MakeEngine, wrong: dict[str, Any]
) -> None:
    engine = make_engine()
    other = asyncio.create_task(
        engine.generate(PROMPT, {"max_new_tokens": 100, "temperature": 0, "ignore_eos": True})
    )
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest):
        await asyncio.wait_for(engine.generate([9, 9], SamplingParams(**wrong)), 5)
    assert (await asyncio.wait_for(other, 5)).token_ids == expected_tokens(PROMPT, 100)


async def test_one_stop_string_is_one_string_however_it_is_given(make_engine: MakeEngine) -> None:
    text = b"The quick brown fox"

    def spell(prefix: int, length: int, vocab: int) -> int:
        return text[(length - len(PROMPT)) % len(text)]

    engine = make_engine(FakeExecutor(capacity(), token_function=spell))
    one: Any = "fox"
    answer = await engine.generate(PROMPT, SamplingParams(max_new_tokens=19, stop=one))
    assert answer.text == "The quick brown "


@pytest.mark.parametrize("prompt", [None, 5, ["a", 5], [1, 2, 3.5], [None], [[1, 2], None]])
async def test_prompt_of_a_wrong_type_is_an_invalid_request(
    make_engine: MakeEngine, prompt: Any
) -> None:
    with pytest.raises(InvalidRequest):
        await make_engine().generate(prompt, {"max_new_tokens": 1})


async def test_text_after_shutdown_finds_the_engine_closed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.generate("abc", {"max_new_tokens": 1})
    await engine.shutdown()
    with pytest.raises(EngineClosed):
        await engine.generate("abc", {"max_new_tokens": 1})


async def test_prefill_line_tells_of_running_requests_that_do_not_ride_along(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(admission="sglang")
    params = {"max_new_tokens": 480, "ignore_eos": True}
    running = [asyncio.create_task(engine.generate([i, 2, 3], params)) for i in range(3)]
    while engine.load().num_running_reqs < 3:
        await asyncio.sleep(0)
    with caplog.at_level("INFO", logger="treadle"):
        await engine.generate(PROMPT, {"max_new_tokens": 1})
    *_, line = [r.getMessage() for r in caplog.records if "Prefill batch" in r.getMessage()]
    assert "#new-seq: 1," in line and "#running-req: 3," in line
    await asyncio.gather(*running)


async def test_create_leaves_the_loop_alone_while_it_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What composes an engine imports torch, which takes a second or more."""
    parts = make_parts(FakeExecutor(capacity()))
    threads: list[threading.Thread] = []

    def load(name: str) -> Any:
        threads.append(threading.current_thread())
        return SimpleNamespace(compose=lambda config, since: parts)

    monkeypatch.setattr(importlib, "import_module", load)
    async with await Engine.create() as engine:
        await engine.generate(PROMPT, {"max_new_tokens": 1})
    assert threads and threading.current_thread() not in threads


async def test_create_that_nobody_waits_for_closes_what_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = FakeExecutor(capacity())
    parts, started, may_end = make_parts(executor), threading.Event(), threading.Event()

    def compose(config: object, since: float) -> Any:
        started.set()
        may_end.wait(10)
        return parts

    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(compose=compose))
    creating = asyncio.create_task(Engine.create())
    await asyncio.to_thread(started.wait, 10)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert executor.is_alive()
    may_end.set()
    async with asyncio.timeout(10):
        while executor.is_alive():
            await asyncio.sleep(0.001)
