"""Whether the host keeps a device busy: streams on a fake executor with a virtual device.

`python -m treadle.perf.overlap_bench [--http]`. Device time is computed, not slept: a step ends
at max(its launch, the end of the one before) + `--step-ms`, and the device idles while the next
launch is late. With `--http` tokens go out as server-sent events to clients in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from treadle.engine import Engine, RequestOutput, SamplingParams
from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.graphs.fake import FakeExecutor
from treadle.graphs.step import Capacity, KvGroup
from treadle.http.server import HttpServer, ServerSettings, run
from treadle.http.state import ServerState
from treadle.tools.model_source import resolve_model
from treadle.tools.tokenizer_source import load_tokenizer

PROMPT_TOKENS = 64
CLIENT_TIMEOUT_S = 600


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="treadle.perf.overlap_bench", description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.client:
        received = asyncio.run(_clients(options.client, options.streams, options.tokens))
        assert received == options.streams, f"{received} streams ended well"
        return 0
    run(_measure(options))
    return 0


async def _measure(options: argparse.Namespace) -> None:
    executor = _executor(options)
    path = resolve_model(None).path
    info = EngineInfo("fake", "fake", "fake", (), "fake", executor.capacity.max_model_len,
                      executor.capacity.vocab_size, 0, "0", {"device": "cpu"})  # fmt: skip
    config = EngineConfig.from_flags({"max_running_requests": options.streams})
    parts = Parts(executor, load_tokenizer(path), info, options.streams, -1, config)
    async with Engine(parts) as engine:
        gc.collect()
        gc.freeze()
        started = time.perf_counter()
        if options.http:
            await _over_http(engine, options)
        else:
            await _in_process(engine, options)
        elapsed = time.perf_counter() - started
    device_s = executor.num_steps * options.step_ms / 1e3
    print(
        f"{options.streams} streams x {options.tokens} tokens, HTTP "
        f"{'on' if options.http else 'off'}: {executor.num_steps} steps, "
        f"host {elapsed / executor.num_steps * 1e3:.2f} ms a step, device idle "
        f"{executor.idle_ms / 1e3 / device_s:.2%} of its {device_s:.2f} s"
    )


def _executor(options: argparse.Namespace) -> FakeExecutor:
    max_len = PROMPT_TOKENS + options.tokens + 8
    group = KvGroup("full", 16, options.streams * (max_len // 16 + 2), 1)
    return FakeExecutor(
        Capacity((group,), options.streams, max_len, 49_152),
        token_function=lambda prefix, length, vocab: 100 + prefix % 40_000,
        step_ms=options.step_ms,
        checks=False,
    )


async def _in_process(engine: Engine, options: argparse.Namespace) -> None:
    left = options.streams
    done = asyncio.get_running_loop().create_future()

    def sink(delta: RequestOutput) -> None:
        nonlocal left
        left -= delta.finish_reason is not None
        if not left:
            done.set_result(None)

    params = SamplingParams(options.tokens, ignore_eos=True)
    for number in range(options.streams):
        engine.submit([number + 100] * PROMPT_TOKENS, params, sink)
    await done


async def _over_http(engine: Engine, options: argparse.Namespace) -> None:
    state = ServerState()
    server = HttpServer(state, ServerSettings(port=0, access_log=False))
    await server.start()
    state.engine = engine
    command = [sys.executable, "-m", "treadle.perf.overlap_bench", "--client",
               f"http://127.0.0.1:{server.port}", "--streams", str(options.streams), "--tokens",
               str(options.tokens)]  # fmt: skip
    client = await asyncio.create_subprocess_exec(*command)
    try:
        if await client.wait():
            raise subprocess.CalledProcessError(client.returncode or 1, command)
    finally:
        await server.stop()


async def _clients(url: str, streams: int, tokens: int) -> int:
    """How many streams came to their proper end."""
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=streams)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        ends = await asyncio.gather(*(_client(session, n, tokens) for n in range(streams)))
    return sum(ends)


async def _client(session: aiohttp.ClientSession, number: int, tokens: int) -> bool:
    body: dict[str, Any] = {
        "prompt": [number + 100] * PROMPT_TOKENS, "max_tokens": tokens, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    last = b""
    async with session.post("/v1/completions", data=json.dumps(body), headers={
        "Content-Type": "application/json"
    }) as answer:  # fmt: skip
        async for piece in answer.content.iter_any():
            last = (last + piece)[-64:]
    return last.endswith(b"data: [DONE]\n\n")


if __name__ == "__main__":
    sys.exit(main())
