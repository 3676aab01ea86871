"""A fake engine with a byte tokenizer, and a real server around it on a free port."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from fake_served import FakeEngine

from treadle.http.server import HttpServer, ServerSettings
from treadle.http.state import ApiSettings, ServerState


@dataclass
class Served:
    """A running server, its engine and a client."""

    engine: FakeEngine
    state: ServerState
    server: HttpServer
    session: aiohttp.ClientSession

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON. A body of bytes goes out as it is."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.session.post(
            self.url + path, data=io.BytesIO(raw), headers=headers
        ) as response:
            return response.status, strict_json(await response.read())

    async def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The events of a stream without the closing [DONE], which must stand there."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return _read_events(await response.read())


def _read_events(raw: bytes) -> list[Any]:
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)
    return [strict_json(event[6:].encode()) for event in events]


def strict_json(raw: bytes) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(raw, parse_constant=refuse) if raw else None


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server: `await serve(settings=ApiSettings(...), engine=None)`."""
    running: list[Served] = []

    async def start(settings: ApiSettings | None = None, *, has_engine: bool = True) -> Served:
        state = ServerState(settings)
        engine = FakeEngine()
        state.engine = engine if has_engine else None
        server = HttpServer(state, ServerSettings(port=0))
        await server.start()
        served = Served(engine, state, server, aiohttp.ClientSession())
        running.append(served)
        return served

    yield start
    for served in running:
        served.engine.gate.set()
        served.engine.encode_gate.set()
        await served.session.close()
        await served.server.stop()
        assert served.engine.num_running == 0 or await settled(served.engine)


async def settled(engine: FakeEngine) -> bool:
    """Whether nothing runs within a second."""
    for _ in range(200):
        if engine.num_running == 0:
            return True
        await asyncio.sleep(0.005)
    return False


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve()
