"""Ports, signals and draining, in this process and in one of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import fake_served
import pytest

from treadle.engine.errors import ConfigError
from treadle.http.server import HttpServer, ServerSettings
from treadle.http.state import ServerState

if TYPE_CHECKING:
    from tests.http.conftest import Served

PROGRAM = """
import asyncio, sys
from fake_served import FakeEngine
from treadle.http.server import ServerSettings, run, serve
from treadle.http.state import ServerState

async def start():
    if sys.argv[2] == "never":
        print("starting", flush=True)
        await asyncio.Event().wait()
    if sys.argv[2] == "error":
        raise RuntimeError("no model here")
    engine = FakeEngine()
    if sys.argv[2] == "closed":
        engine.gate.clear()
    if sys.argv[2] == "lost":
        engine.lost.set()
    return engine

async def main():
    settings = ServerSettings(port=0, shutdown_timeout_s=float(sys.argv[1]))
    ready = lambda port: print("port", port, flush=True)
    await serve(start, ServerState(), settings, ready)
    assert "torch" not in sys.modules
    print("clean", flush=True)

run(main())
"""


class Program:
    """A server process and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.session = session
        self.port = 0

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 20)).decode().rstrip()

    async def post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await self.session.post(f"http://127.0.0.1:{self.port}/generate", json=body)

    async def is_ready(self) -> bool:
        async with self.session.get(f"http://127.0.0.1:{self.port}/ready") as response:
            return response.status == 200


async def launch(session: aiohttp.ClientSession, timeout: float, mode: str) -> Program:
    paths = (str(Path(fake_served.__file__).parent), os.environ.get("PYTHONPATH"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(timeout), mode,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    program = Program(process, session)
    if mode in ("open", "closed"):
        word, port = (await program.line()).split()
        assert word == "port"
        program.port = int(port)
    return program


LONG = {
    "text": "a",
    "stream": True,
    "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
}


async def test_port_in_use_is_a_clear_error(served: Served) -> None:
    other = HttpServer(ServerState(), ServerSettings(port=served.port))
    with pytest.raises(ConfigError, match=f"--port {served.port}"):
        await other.start()


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70_000)])
async def test_impossible_address_is_a_clear_error(host: str, port: int) -> None:
    server = HttpServer(ServerState(), ServerSettings(host=host, port=port))
    with pytest.raises(ConfigError, match="--host"):
        await server.start()


@pytest.mark.server
async def test_signal_lets_streams_finish_and_refuses_new_work() -> None:
    async with aiohttp.ClientSession() as session:
        program = await launch(session, 20, "open")
        streams = [await program.post(LONG) for _ in range(4)]
        await asyncio.gather(*(stream.content.readany() for stream in streams))
        program.process.send_signal(signal.SIGTERM)
        while (refused := await program.post({"text": "a"})).status == 200:
            await asyncio.sleep(0.01)
        assert refused.status == 503
        assert "Retry-After" in refused.headers
        for stream in streams:
            events = (await stream.read()).decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            assert json.loads(events[-3][6:])["meta_info"]["finish_reason"]["type"] == "length"
        out, err = await asyncio.wait_for(program.process.communicate(), 10)
        assert (program.process.returncode, err) == (0, b"")
        lines = out.decode().splitlines()
        assert lines[-1] == "clean"
        access = [line for line in lines if "POST /generate" in line]
        assert len([line for line in access if line.endswith('HTTP/1.1" 200 OK')]) >= 4
        assert any(line.endswith('HTTP/1.1" 503 Service Unavailable') for line in access)
        assert all(line.startswith("INFO:     127.0.0.1:") for line in access)


@pytest.mark.server
@pytest.mark.parametrize("second_signal", [True, False])
async def test_drain_ends_at_the_timeout_or_the_second_signal(second_signal: bool) -> None:
    async with aiohttp.ClientSession() as session:
        program = await launch(session, 60 if second_signal else 0.3, "closed")
        stream = await program.post(LONG)
        started = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        if second_signal:
            while await program.is_ready():
                await asyncio.sleep(0.01)
            program.process.send_signal(signal.SIGINT)
        events = (await stream.read()).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3][6:])["meta_info"]["finish_reason"]["type"] == "abort"
        _, err = await asyncio.wait_for(program.process.communicate(), 20)
        assert (program.process.returncode, err) == (0, b"")
        assert time.monotonic() - started < 30


@pytest.mark.server
async def test_signal_while_starting_ends_at_once() -> None:
    async with aiohttp.ClientSession() as session:
        program = await launch(session, 60, "never")
        assert await program.line() == "starting"
        program.process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(program.process.communicate(), 10)
        assert (program.process.returncode, out, err) == (0, b"clean\n", b"")


@pytest.mark.server
async def test_failure_to_start_reaches_the_caller() -> None:
    async with aiohttp.ClientSession() as session:
        program = await launch(session, 60, "error")
        _, err = await asyncio.wait_for(program.process.communicate(), 20)
        assert program.process.returncode == 1
        assert b"RuntimeError: no model here" in err
        assert b"never retrieved" not in err


@pytest.mark.server
async def test_loss_of_the_engine_ends_the_server() -> None:
    async with aiohttp.ClientSession() as session:
        program = await launch(session, 60, "lost")
        out, err = await asyncio.wait_for(program.process.communicate(), 20)
        assert program.process.returncode == 0
        assert len(err.splitlines()) == 1 and b"device is lost" in err
        assert out.endswith(b"clean\n")
