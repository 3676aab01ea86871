"""Programs that end without shutting their engine down, and servers that lose their device."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tiny_engine

PROGRAM = """
import asyncio, sys
from treadle.engine import Engine

async def main():
    engine = await Engine.create(model_path=sys.argv[1])
    params = {"max_new_tokens": 4000, "ignore_eos": True}
    running = asyncio.create_task(engine.generate("a", params))
    await asyncio.sleep(0.7)

asyncio.run(main())
"""


@pytest.mark.model
@pytest.mark.slow
def test_program_that_ends_while_a_request_runs_exits_cleanly(smollm2_gguf: Path) -> None:
    """Half of the runs met an interpreter that was gone, and died by SIGABRT."""
    for _ in range(6):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(smollm2_gguf)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2000:]


SERVER = """
import argparse, asyncio, logging, signal, sys, threading
import tiny_engine
from treadle.graphs.device import HostDevice
from treadle.graphs.executor import DeviceExecutor
from treadle.tools import compose, serve

class Fragile(HostDevice):
    is_broken = False

    def record(self):
        if Fragile.is_broken:
            raise RuntimeError("the device fell off the bus")
        return super().record()

    def is_lost(self):
        return Fragile.is_broken

def break_device(*_):
    Fragile.is_broken = True

async def close(executor):
    await asyncio.to_thread(threading.Event().wait)

if sys.argv[1] == "stuck":
    DeviceExecutor.close = close

tiny_engine.HostDevice = Fragile
compose.compose = lambda config, since: tiny_engine.tiny_parts(
    tiny_engine.tiny_decoder(), tokens=8192, disable_radix_cache=True
)[0]
signal.signal(signal.SIGUSR1, break_device)
logging.basicConfig(level="INFO", stream=sys.stderr)
options = argparse.Namespace(
    host="127.0.0.1", port=0, shutdown_timeout=600.0, enable_cache_report=False,
    incremental_streaming_output=False,
)
sys.exit(serve.serve(options, {}))
"""


class Server:
    """A server process with a small random model, whose device fails on SIGUSR1."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    async def num_requests(self, session: aiohttp.ClientSession) -> int:
        async with session.get(self.url + "/server_info") as response:
            (state,) = (await response.json())["internal_states"]
        return int(state["num_running_reqs"] + state["num_waiting_reqs"])

    async def ends(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 30)


@asynccontextmanager
async def fragile_server(log: Path, threads: str) -> AsyncIterator[Server]:
    paths = (str(Path(tiny_engine.__file__).parent), os.environ.get("PYTHONPATH"))
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVER, threads, stderr=stderr, stdout=stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            while (found := re.search(r"http://127.0.0.1:(\d+)", log.read_text())) is None:
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        yield Server(process, int(found[1]), log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def request(count: int, **sampling: Any) -> dict[str, Any]:
    params = {"max_new_tokens": count, "ignore_eos": True, **sampling}
    return {"input_ids": [1, 2, 3], "stream": True, "sampling_params": params}


def deaf_client(port: int, body: bytes) -> socket.socket:
    """Asks for more than the kernel buffers, and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


@pytest.mark.server
@pytest.mark.parametrize(
    ("is_deaf", "threads"), [(False, "fine"), (False, "stuck"), (True, "fine")]
)
async def test_lost_device_ends_streams_and_then_the_server(
    tmp_path: Path, is_deaf: bool, threads: str
) -> None:
    log = tmp_path / "log"
    async with (
        AsyncExitStack() as open_sockets,
        fragile_server(log, threads) as server,
        aiohttp.ClientSession() as session,
    ):
        if is_deaf:
            body = json.dumps(request(500, n=16)).encode()
            open_sockets.enter_context(deaf_client(server.port, body))
            while not await server.num_requests(session):
                await asyncio.sleep(0.01)
            while await server.num_requests(session):  # then all is made, and most of it is stuck
                await asyncio.sleep(0.05)
        stream = await session.post(server.url + "/generate", json=request(500))
        await stream.content.readany()
        server.process.send_signal(signal.SIGUSR1)
        *_, error, done, end = (await stream.read()).decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert "fell off the bus" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert await server.ends() == 1, server.log.read_text()
        assert log.read_text().count("the server ends its streams and leaves") == 1
