"""Priorities, keys that part cached prefixes, a full queue, and flushing what is cached."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from treadle.engine.options import RequestOptions

if TYPE_CHECKING:
    from tests.http.conftest import Serve, Served

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "u"}]},
    TEXT: {"prompt": "p"},
    NATIVE: {"text": "p"},
}
HEADER = "x-smg-routing-key"
paths = pytest.mark.parametrize("path", BASE)


async def post(served: Served, path: str, body: dict[str, Any], key: str | None = None) -> int:
    headers = {} if key is None else {HEADER: key}
    async with served.session.post(served.url + path, json=body, headers=headers) as response:
        await response.read()
        return response.status


@paths
async def test_options_reach_the_engine(served: Served, path: str) -> None:
    priority = random.choice((-(2**63), -7, 0, 2**63 - 1))
    body = {**BASE[path], "priority": priority, "extra_key": "tenant", "cache_salt": "s"}
    assert await post(served, path, body, "route") == 200
    assert served.engine.submitted[0].options == RequestOptions(priority, "route", "tenant", "s")


@paths
async def test_options_are_absent_by_default(served: Served, path: str) -> None:
    empty = {"priority": None, "extra_key": "", "cache_salt": None}
    for body in (BASE[path], {**BASE[path], **empty}):
        assert await post(served, path, body) == 200
    assert [each.options for each in served.engine.submitted] == [RequestOptions()] * 2


@pytest.mark.parametrize(("path", "key"), [(TEXT, "prompt"), (NATIVE, "text")])
async def test_batch_may_have_a_key_for_each_prompt(served: Served, path: str, key: str) -> None:
    body = {key: ["a", "b", "c"], "extra_key": ["x", None, "z"], "cache_salt": "s"}
    assert await post(served, path, body) == 200
    found = {bytes(s.ids[1:]): s.options for s in served.engine.submitted}
    assert found == {
        b"a": RequestOptions(extra_key="x", cache_salt="s"),
        b"b": RequestOptions(cache_salt="s"),
        b"c": RequestOptions(extra_key="z", cache_salt="s"),
    }


async def test_routing_key_of_the_body_goes_before_the_header(served: Served) -> None:
    assert await post(served, NATIVE, {"text": "p", "routing_key": "mine"}, "theirs") == 200
    assert served.engine.submitted[0].options.routing_key == "mine"


@paths
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 1.5), ("priority", True), ("priority", "1"), ("priority", 2**63),
        ("priority", [1]), ("extra_key", 5), ("extra_key", "x" * 1025), ("extra_key", ["a", "b"]),
        ("extra_key", []), ("extra_key", {}), ("cache_salt", [5]), ("cache_salt", ["x" * 2000]),
    ],
    ids=lambda value: str(value)[:16],
)  # fmt: skip
async def test_bad_option_is_named(served: Served, path: str, name: str, value: Any) -> None:
    status, answer = await served.post(path, {**BASE[path], name: value})
    assert status == 400
    assert answer["error"]["param"].startswith(name)
    assert len(answer["error"]["message"]) < 300
    assert served.engine.submitted == []


@paths
@pytest.mark.parametrize("stream", [False, True])
async def test_full_queue_is_503_and_when_to_come_back(
    served: Served, path: str, stream: bool
) -> None:
    served.engine.max_queued = 1
    served.engine.gate.clear()
    first = asyncio.create_task(served.post(NATIVE, {"text": "a"}))
    while not served.engine.num_running:
        await asyncio.sleep(0.001)
    body = {**BASE[path], "stream": stream}
    async with served.session.post(served.url + path, json=body) as response:
        error = (await response.json())["error"]
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
    assert (error["code"], error["type"]) == ("queue_full", "service_unavailable")
    assert "queue is full" in error["message"]
    served.engine.gate.set()
    assert (await first)[0] == 200
    assert (await served.post(path, BASE[path]))[0] == 200


async def test_queue_that_fills_within_a_batch_ends_the_batch(served: Served) -> None:
    served.engine.max_queued = 2
    status, answer = await served.post(NATIVE, {"text": ["a", "b", "c"]})
    assert (status, answer["error"]["code"]) == (503, "queue_full")
    assert sorted(served.engine.aborted) == sorted(s.request_id for s in served.engine.submitted)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_says_what_it_did(served: Served, method: str) -> None:
    async with served.session.request(method, served.url + "/flush_cache") as response:
        assert response.status == 200
        assert (await response.text()).startswith("Cache flushed. 7 tokens")
    assert served.engine.flush_timeouts == [0.0]


async def test_flush_of_a_busy_engine_is_refused_or_waits(served: Served) -> None:
    served.engine.gate.clear()
    running = asyncio.create_task(served.post(NATIVE, {"text": "a"}))
    while not served.engine.num_running:
        await asyncio.sleep(0.001)
    status, answer = await served.post("/flush_cache?timeout=0.01", b"")
    assert (status, answer["error"]["code"]) == (400, "not_idle")
    assert answer["error"]["message"] == "1 requests run"
    waiting = asyncio.create_task(served.session.post(served.url + "/flush_cache?timeout=60"))
    while len(served.engine.flush_timeouts) < 2:
        await asyncio.sleep(0.001)
    served.engine.gate.set()
    assert (await running)[0] == 200
    assert (await waiting).status == 200
    assert served.engine.flush_timeouts == [0.01, 60.0]


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf", "1e9", "soon", "-0.001", "x" * 500])
async def test_bad_timeout_of_a_flush_is_named(served: Served, timeout: str) -> None:
    status, answer = await served.post(f"/flush_cache?timeout={timeout}", b"")
    assert (status, answer["error"]["param"]) == (400, "timeout")
    assert "from 0 to 3600" in answer["error"]["message"]
    assert served.engine.flush_timeouts == []


async def test_head_flushes_nothing(served: Served) -> None:
    async with served.session.head(served.url + "/flush_cache") as response:
        assert response.status == 405
    assert served.engine.flush_timeouts == []


async def test_flush_while_starting_is_503(serve: Serve) -> None:
    served = await serve(has_engine=False)
    assert (await served.post("/flush_cache", b""))[0] == 503
