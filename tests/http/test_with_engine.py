"""The server around the real engine on a fake executor: stops, failures, drops, page accounting."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from fake_engine import EOS, capacity, expected_tokens, make_parts

from treadle.engine import Engine
from treadle.graphs.fake import FakeExecutor
from treadle.http.server import HttpServer, ServerSettings
from treadle.http.state import ServerState

LETTERS = b"abcdefghij"
LONG = {"max_new_tokens": 300}


def letters(prefix: int, length: int, vocab_size: int) -> int:
    """A text without special tokens: any string may turn up, none ends it."""
    return LETTERS[(prefix >> 9) % len(LETTERS)]


@dataclass
class Running:
    engine: Engine
    executor: FakeExecutor
    session: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event[6:]) for event in events[:-2]]


@pytest.fixture
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """Settings of the engine come as the fixture's parameter."""
    executor = FakeExecutor(capacity(slots=8), token_function=letters)
    engine = Engine(make_parts(executor, **getattr(request, "param", {})))
    state = ServerState()
    state.engine = engine
    server = HttpServer(state, ServerSettings(port=0))
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield Running(engine, executor, session, f"http://127.0.0.1:{server.port}")
    await server.stop()
    for _ in range(1000):
        if not engine.load().num_running_reqs + engine.load().num_waiting_reqs:
            break
        await asyncio.sleep(0.002)
    load = engine.load()
    assert (load.num_running_reqs, load.num_waiting_reqs) == (0, 0)
    engine.scheduler.check_integrity()
    await engine.shutdown()


def continuation(prompt: str, count: int) -> str:
    return bytes(expected_tokens(list(prompt.encode()), count, letters)).decode()


async def test_text_is_what_the_device_made(running: Running) -> None:
    prompt = "".join(random.choices("xyz ", k=random.randrange(1, 200)))
    _, answer = await running.post("/v1/completions", {"prompt": prompt, "max_tokens": 50})
    assert answer["choices"][0]["text"] == continuation(prompt, 50)
    assert answer["usage"]["completion_tokens"] == 50


@pytest.mark.parametrize("keep", [False, True])
async def test_stop_string_ends_stream_and_answer_alike(running: Running, keep: bool) -> None:
    prompt = "".join(random.choices("xyz ", k=20))
    whole = continuation(prompt, 80)
    stop = whole[30:33]
    expected = whole[: whole.index(stop) + (len(stop) if keep else 0)]
    body = {"prompt": prompt, "max_tokens": 80, "stop": ["zz", stop], "no_stop_trim": keep}
    _, answer = await running.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    assert choice["matched_stop"] == stop
    streamed = [e["choices"][0] for e in await running.events("/v1/completions", body)]
    assert "".join(c["text"] for c in streamed) == expected
    assert (streamed[-1]["finish_reason"], streamed[-1]["matched_stop"]) == ("stop", stop)


async def test_chat_folds_to_the_same_answer(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "n": 3}
    _, answer = await running.post("/v1/chat/completions", body)
    texts = [""] * 3
    for event in await running.events("/v1/chat/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


async def test_absent_length_fills_the_context(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    _, answer = await running.post("/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == running.engine.info.max_model_len


@pytest.mark.parametrize("over", [-1, 0, 1, 5000])
async def test_prompt_at_the_edge_of_the_context(running: Running, over: int) -> None:
    longest = running.engine.info.max_model_len
    status, answer = await running.post("/v1/completions", {"prompt": [97] * (longest + over)})
    if over < 0:
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1
    else:
        assert status == 400
        assert str(longest) in answer["error"]["message"]
        assert str(longest + over) in answer["error"]["message"]


@pytest.mark.parametrize("bad", [[-1], [300], [97, 10**9], []])
async def test_illegal_ids_never_reach_the_device(running: Running, bad: list[int]) -> None:
    steps = running.executor.num_steps
    for path, key in (("/v1/completions", "prompt"), ("/generate", "input_ids")):
        status, answer = await running.post(path, {key: bad})
        assert (status, answer["error"]["param"]) == (400, key)
    assert running.executor.num_steps == steps


async def test_failed_step_is_an_error_of_its_request(running: Running) -> None:
    running.executor.fail_next = RuntimeError("device trouble")
    status, answer = await running.post("/generate", {"text": "a"})
    assert status >= 500
    assert answer["error"]["type"] in ("server_error", "service_unavailable")


async def test_random_drops_and_aborts_leave_every_page_free(running: Running) -> None:
    async def one(number: int) -> None:
        await asyncio.sleep(random.random() * 0.3)
        params = {"max_new_tokens": 300, "n": random.randrange(1, 3)}
        body = {"text": "x" * random.randrange(1, 100), "rid": f"r{number}", "stream": True,
                "sampling_params": params}  # fmt: skip
        async with running.session.post(running.url + "/generate", json=body) as response:
            fate = random.choice(("drop", "abort", "read"))
            if fate != "read":
                await response.content.readany()
            if fate == "abort":
                rid = {"rid": f"r{number}"}
                async with running.session.post(running.url + "/abort_request", json=rid):
                    pass
            if fate == "drop":
                response.close()
            else:
                assert (await response.text()).endswith("data: [DONE]\n\n")

    await asyncio.gather(*(one(number) for number in range(80)))


async def test_end_token_is_reported_as_matched(running: Running) -> None:
    running.executor._token_function = lambda prefix, length, vocab: EOS if length > 8 else 97
    _, answer = await running.post("/generate", {"text": "xyz"})
    assert answer["text"] == "a" * 6
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert answer["output_ids"] == [97] * 6 + [EOS]


async def test_warm_prompt_is_reported_and_flushed(running: Running) -> None:
    prompt = [random.randrange(97, 107) for _ in range(random.randrange(20, 60))]
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 8}}
    _, cold = await running.post("/generate", body)
    _, warm = await running.post("/generate", body)
    _, apart = await running.post("/generate", {**body, "extra_key": "other"})
    async with running.session.post(running.url + "/flush_cache") as response:
        assert (response.status, (await response.text())[:14]) == (200, "Cache flushed.")
    _, flushed = await running.post("/generate", body)
    page_size = 4
    found = [each["meta_info"]["cached_tokens"] for each in (cold, warm, apart, flushed)]
    assert found == [0, (len(prompt) - 1) // page_size * page_size, 0, 0]
    assert len({each["text"] for each in (cold, warm, apart, flushed)}) == 1


@pytest.mark.parametrize(
    "running", [{"max_running_requests": 1, "max_queued_requests": 1}], indirect=True
)
async def test_full_queue_is_503_and_others_finish(running: Running) -> None:
    async def one() -> tuple[int, Any]:
        return await running.post("/generate", {"text": "x", "sampling_params": LONG})

    answers = await asyncio.gather(*(one() for _ in range(12)))
    codes = [answer["error"]["code"] for status, answer in answers if status == 503]
    assert 0 < len(codes) < 12
    assert set(codes) == {"queue_full"}
    texts = {answer["text"] for status, answer in answers if status == 200}
    assert texts == {continuation("x", LONG["max_new_tokens"])}


async def test_flush_of_a_busy_engine_is_refused_until_it_is_idle(running: Running) -> None:
    stream = await running.session.post(
        running.url + "/generate", json={"text": "x", "stream": True, "sampling_params": LONG}
    )
    await stream.content.readany()
    async with running.session.post(running.url + "/flush_cache") as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "not_idle"
    async with running.session.post(running.url + "/flush_cache?timeout=30") as response:
        assert response.status == 200
    assert (await stream.text()).endswith("data: [DONE]\n\n")
