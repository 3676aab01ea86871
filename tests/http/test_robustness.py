"""The server after requests that no client should send, and a port that is none."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from fake_engine import capacity, make_parts

from treadle.engine import Engine
from treadle.engine.errors import ConfigError
from treadle.graphs.fake import FakeExecutor
from treadle.http.server import HttpServer, ServerSettings, run
from treadle.http.state import ServerState


async def test_call_that_overfills_an_idle_queue_does_not_close_the_server() -> None:
    engine = Engine(make_parts(FakeExecutor(capacity(slots=8)), max_queued_requests=3))
    state = ServerState()
    state.engine = engine
    server = HttpServer(state, ServerSettings(port=0))
    await server.start()
    url = f"http://127.0.0.1:{server.port}/generate"
    small = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
    try:
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json=small) as response:
                assert response.status == 200
            await asyncio.sleep(0.02)  # the engine sleeps
            many = {"text": "a", "sampling_params": {"max_new_tokens": 2, "n": 4}}
            async with session.post(url, json=many) as response:
                assert response.status == 503
            await asyncio.sleep(0.1)
            async with session.post(url, json=small) as response:
                assert response.status == 200, await response.text()
    finally:
        await server.stop()
        await engine.shutdown()


@pytest.mark.parametrize("port", [65536, 98537, 99999999])
def test_port_out_of_range_is_refused_on_the_loop_that_serves(port: int) -> None:
    async def start() -> None:
        server = HttpServer(ServerState(), ServerSettings(port=port))
        try:
            with pytest.raises(ConfigError, match="port"):
                await server.start()
        finally:
            await server.stop()

    run(start())
