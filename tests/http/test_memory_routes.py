"""Releasing and resuming memory over HTTP, and what clients see of a device that is lost."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
from fake_engine import capacity, expected_tokens, make_parts

from treadle.engine import Engine
from treadle.engine.errors import InvalidRequest
from treadle.graphs.fake import FakeExecutor
from treadle.graphs.step import MEMORY_TAGS
from treadle.http.server import HttpServer, ServerSettings
from treadle.http.state import ServerState

if TYPE_CHECKING:
    from tests.http.conftest import Served

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("body", "tags"),
    [
        (b"", None),
        (b" null ", None),
        (b"{}", None),
        (b'{"tags": null}', None),
        (b'{"tags": []}', ()),
        (b'{"tags": "weights"}', ("weights",)),
        (b'{"tags": ["kv_cache", "weights"], "other": 1}', ("kv_cache", "weights")),
    ],
)
async def test_tags_reach_the_engine(
    served: Served, method: str, body: bytes, tags: tuple[str, ...] | None
) -> None:
    for path, name in ((RELEASE, "release"), (RESUME, "resume")):
        url = served.url + path
        async with served.session.request(method, url, data=body) as response:
            assert (response.status, await response.json()) == (200, None)
        assert served.engine.memory_calls.pop() == (name, tags)


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"tags": 5}', b'{"tags": [5]}', b"5"])
async def test_body_of_another_shape_is_400(served: Served, body: bytes) -> None:
    for path in (RELEASE, RESUME):
        status, answer = await served.post(path, body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert served.engine.memory_calls == []


async def test_refusal_and_failure_say_why(served: Served) -> None:
    served.engine.memory_error = InvalidRequest("only with --enable-memory-saver", "tags")
    for path in (RELEASE, RESUME):
        status, answer = await served.post(path, {})
        assert (status, answer["error"]["param"]) == (400, "tags")
        assert "--enable-memory-saver" in answer["error"]["message"]
    served.engine.memory_error = RuntimeError("cuMemCreate failed")
    status, answer = await served.post(RESUME, {})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "cuMemCreate failed" in answer["error"]["message"]


@asynccontextmanager
async def served_by(engine: Engine) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    state = ServerState()
    state.engine = engine
    server = HttpServer(state, ServerSettings(port=0))
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield f"http://127.0.0.1:{server.port}", session
    await server.stop()
    await engine.shutdown()


def events(raw: bytes) -> list[Any]:
    lines = raw.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def native(count: int, **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"sampling_params": params, **more}


async def test_stream_waits_out_a_release_and_the_server_stays_healthy() -> None:
    engine = Engine(make_parts(FakeExecutor(capacity())))
    async with served_by(engine) as (url, session):
        body = native(300, input_ids=[1, 2, 3], stream=True)
        stream = await session.post(url + "/generate", json=body)
        await stream.content.readany()
        async with session.post(url + RELEASE) as response:
            assert response.status == 200
        async with session.get(url + "/health") as response:
            health = await response.text()
            assert (response.status, health) == (200, "released: weights, kv_cache, cuda_graph\n")
        async with session.get(url + "/ready") as response:
            assert response.status == 200
        late = asyncio.create_task(
            session.post(url + "/generate", json=native(4, input_ids=[7, 8]))
        )
        while not engine.load().num_waiting_reqs > 1:
            await asyncio.sleep(0.001)
        async with session.post(url + RESUME, json={"tags": ["kv"]}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "tags[0]")
            assert all(tag in error["message"] for tag in MEMORY_TAGS)
        async with session.post(url + RESUME, json={"tags": ["weights", "kv_cache"]}) as response:
            assert response.status == 200
        async with session.get(url + "/health") as response:
            assert await response.text() == "released: cuda_graph\n"
        assert not late.done()
        async with session.get(url + RESUME) as response:
            assert response.status == 200
        last = events(await stream.read())[-1]
        assert last["output_ids"] == expected_tokens([1, 2, 3], 300)
        async with await late as response:
            assert (await response.json())["output_ids"] == expected_tokens([7, 8], 4)
        async with session.get(url + "/health") as response:
            assert (response.status, await response.read()) == (200, b"")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", native(400, input_ids=[1, 2, 3])),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_lost_device_ends_streams_with_an_error(path: str, body: dict[str, Any]) -> None:
    executor = FakeExecutor(capacity(), token_function=lambda *_: 97)
    engine = Engine(make_parts(executor, max_running_requests=1))
    async with served_by(engine) as (url, session):
        stream = await session.post(url + path, json={**body, "stream": True})
        await stream.content.readany()
        whole = asyncio.create_task(session.post(url + path, json=body))
        while not engine.load().num_waiting_reqs:
            await asyncio.sleep(0.001)
        executor.is_lost, executor.fail_next = True, RuntimeError("an illegal memory access")
        error = events(await stream.read())[-1]["error"]
        assert error["message"] and error["type"] in ("server_error", "service_unavailable")
        async with await whole as response:
            answer = await response.json()
            assert response.status == 503 and "the device is lost" in answer["error"]["message"]
        for probe in ("/health", "/ready"):
            async with session.get(url + probe) as response:
                assert response.status == 503
        async with session.post(url + path, json=body) as response:
            assert response.status == 503
            assert "the device is lost" in (await response.json())["error"]["message"]


def memory_used() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.model
async def test_real_model_gives_its_memory_back_and_answers_the_same(smollm2_gguf: Path) -> None:
    engine = await Engine.create(
        model_path=str(smollm2_gguf), dtype="float32", max_total_tokens=4096
    )
    num_weight_bytes = 134_515_008 * 4  # parameters of SmolLM2-135M, tied embeddings counted once
    body = native(24, text="The capital of France is")
    async with served_by(engine) as (url, session):

        async def answer() -> list[int]:
            async with session.post(url + "/generate", json=body) as response:
                ids: list[int] = (await response.json())["output_ids"]
                return ids

        expected = await answer()
        assert len(expected) == 24
        for tags in (*([tag] for tag in MEMORY_TAGS), None):
            stream = await session.post(url + "/generate", json={**body, "stream": True})
            await stream.content.readany()
            before = memory_used()
            async with session.post(url + RELEASE, json={"tags": tags}) as response:
                assert response.status == 200
            freed = before - memory_used()
            if tags in (None, ["weights"]):
                assert freed > 0.8 * num_weight_bytes
            waiting = asyncio.create_task(answer())
            async with session.post(url + RESUME, json={"tags": tags}) as response:
                assert response.status == 200
            assert events(await stream.read())[-1]["output_ids"] == expected, tags
            assert await waiting == expected, tags
            assert await answer() == expected, tags
