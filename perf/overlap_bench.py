"""Whether the host keeps a device busy, and what a step costs it: streams on a virtual device.

`python -m treadle.perf.overlap_bench [--http] [--json]`. Device time is computed, not slept: a
step ends at max(its launch, the end of the one before) + `--step-ms`, and the device idles while
the next launch is late. Measured are the steps in which all streams decode. With `--http` tokens
go out as server-sent events to clients in another process. Knows no real device.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from treadle.engine import Engine, RequestOutput, SamplingParams
from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.engine.request import Request
from treadle.engine.text_stream import TextStream
from treadle.graphs.buffers import InputBuffers, Padding
from treadle.graphs.device import HostDevice
from treadle.graphs.fake import FakeExecutor, FakeHandle
from treadle.graphs.step import Capacity, KvGroup, Step, StepResult
from treadle.http.server import HttpServer, ServerSettings, run
from treadle.http.state import ServerState
from treadle.perf import socket_floor
from treadle.perf.stopwatch import Stopwatch
from treadle.tools.model_source import resolve_model
from treadle.tools.tokenizer_source import load_tokenizer

PROMPT_TOKENS = 64
WARM_UP_TOKENS = 100
CLIENT_TIMEOUT_S = 600
FIRST_TOKEN, NUM_TOKENS = 100, 4000  # a text's own words, as it were; none is special
PARTS = ("schedule", "fill", "launch", "update", "detokenize", "write", "loop", "fake")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Milliseconds are of one step; `fake` is what stands in for a model."""

    num_steps: int
    host_ms: float
    cpu_ms: float
    idle: float  # share of the device's time, by the launches as they came
    idle_awaited: float  # the same if the host had waited for results, as it must in earnest
    parts_ms: dict[str, float]  # add up to host_ms; empty in a run without a stopwatch
    tokens_per_delta: float  # more than 1 where output gave way to a step that was done


class VirtualDevice(FakeExecutor):
    """Measures from the first step in which every stream decodes to the last."""

    def __init__(
        self, options: argparse.Namespace, watch: Stopwatch | None, *, announces: bool
    ) -> None:
        """announces: handles say when a step is done, as a device's do, so output can give way."""
        max_len = PROMPT_TOKENS + options.tokens + 8
        group = KvGroup("full", 16, options.streams * (max_len // 16 + 2), 1)
        capacity = Capacity((group,), options.streams, max_len, 49_152)
        super().__init__(capacity, step_ms=options.step_ms)
        self.figures: Figures | None = None
        self._streams: int = options.streams
        self.num_deltas = 0
        self._watch = watch
        self._announces = announces
        self.pack = _packer(self.capacity, self.depth)
        self._started: tuple[float, float] | None = None  # wall and CPU seconds
        self._measured = 0  # steps
        self._skipped = 0.0  # seconds that the host would have waited
        self._ends: dict[int, float] = {}  # of launched steps, on the host's clock with waits
        self._last_end = 0.0
        self._idle_awaited = 0.0

    def launch(self, step: Step) -> FakeHandle:
        is_full = step.plan.mode == "decode" and step.plan.num_rows == self._streams
        if is_full and self._started is None:
            self._start()
        elif not is_full and self._started is not None and self.figures is None:
            self._stop()
        if is_full:
            self.pack(step)
        handle = super().launch(step)
        now = time.perf_counter() + self._skipped
        if is_full and not self._measured:
            self._last_end = now
        self._idle_awaited += max(0.0, now - self._last_end)
        end = self._last_end = max(now, self._last_end) + self._step_ms / 1e3
        self._ends[step.seq] = end
        if self._announces:
            setattr(handle, "done", lambda: self._is_done(handle, end))  # noqa: B010
        self._measured += is_full
        return handle

    def _is_done(self, handle: FakeHandle, end: float) -> bool:
        return handle.result is not None or time.perf_counter() + self._skipped >= end

    def run_until(self, seq: int) -> None:
        super().run_until(seq)
        self._skipped = max(self._skipped, self._ends.pop(seq, 0.0) - time.perf_counter())

    def _run(self, handle: FakeHandle) -> StepResult:
        """All tokens at once, so that the stand-in for a model takes next to nothing."""
        self.num_steps += 1
        plan = handle.step.plan
        tokens = FIRST_TOKEN + (plan.req_slot * 7919 + handle.seq * 104_729) % NUM_TOKENS
        accepted = plan.samples.astype(np.int32)
        return StepResult(handle.seq, tokens[:, None].astype(np.int32), accepted, self._step_ms)

    def _start(self) -> None:
        """What the device had queued by now is forgotten: it could hide a slow step."""
        self._device_free_at = None
        self.idle_ms = self._skipped = self._idle_awaited = 0.0
        self.num_deltas = 0
        self._ends.clear()
        self._started = time.perf_counter(), time.process_time()
        if self._watch is not None:
            self._watch.restart()

    def _stop(self) -> None:
        assert self._started is not None
        wall, cpu = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        steps, parts = self._measured, {}
        if self._watch is not None:
            parts, wall = self._watch.read(), self._watch.elapsed
        device_s = steps * self._step_ms / 1e3
        self.figures = Figures(
            steps, wall / steps * 1e3, cpu / steps * 1e3, self.idle_ms / 1e3 / device_s,
            self._idle_awaited / device_s,
            {part: parts.get(part, 0.0) / steps * 1e3 for part in PARTS if parts},
            steps * self._streams / self.num_deltas,
        )  # fmt: skip


def _packer(capacity: Capacity, depth: int) -> Callable[[Step], object]:
    """What a device's launch thread does with a decode plan before it replays a graph."""
    (group,) = capacity.groups
    width = -(-capacity.max_model_len // group.page_size)
    buffers = InputBuffers(HostDevice(), depth + 1, capacity.slots, Padding(0, 0, 0))

    def pack(step: Step) -> object:
        plan = step.plan
        arrays: dict[str, npt.NDArray[Any]] = {
            "slots": plan.req_slot,
            "temperature": plan.sampling.temperature,
        }
        update = plan.page_updates.get(group.name)
        places: dict[str, npt.NDArray[Any]] = {}
        if update is not None:
            places["page_place"] = update.req_slot.astype(np.int64) * width + update.index
            places["page_id"] = update.page_id
        fits = update is None or len(update.page_id) <= plan.num_rows
        return buffers.fill(
            step.seq, plan.num_rows, arrays | places if fits else arrays, {} if fits else places
        )

    return pack


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="treadle.perf.overlap_bench", description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.client:
        received = asyncio.run(_clients(options.client, options.streams, options.tokens))
        assert received == options.streams, f"{received} streams ended well"
        return 0
    warm_up = argparse.Namespace(**{**vars(options), "tokens": WARM_UP_TOKENS})
    run(_measure(warm_up, None))  # a process touches most of its memory only once
    figures = {
        "plain": run(_measure(options, None)),
        "giving way": run(_measure(options, None, announces=True)),
        "with a stopwatch": run(_measure(options, Stopwatch("loop"))),
    }
    floor = socket_floor.measure(options.streams) if options.http else None
    if options.json:
        runs = {name: asdict(each) for name, each in figures.items()}
        print(json.dumps({"streams": options.streams, "tokens": options.tokens,
                          "step_ms": options.step_ms, "http": options.http, "runs": runs,
                          "socket_floor_ms": floor}))  # fmt: skip
    else:
        _show(options, figures, floor)
    return 0


def _show(
    options: argparse.Namespace, figures: dict[str, Figures], floor: dict[str, float] | None
) -> None:
    print(
        f"{options.streams} streams, HTTP {'on' if options.http else 'off'}, a step every "
        f"{options.step_ms} ms on the device"
    )
    for name, each in figures.items():
        print(
            f"{name:<17} host {each.host_ms:.2f} ms a step ({each.cpu_ms:.2f} of CPU), device idle "
            f"{each.idle:.2%}, {each.idle_awaited:.2%} if every result is awaited, "
            f"{each.tokens_per_delta:.2f} tokens a delta, {each.num_steps} steps"
        )
        if each.parts_ms:
            print("  " + " + ".join(f"{part} {ms:.2f}" for part, ms in each.parts_ms.items()))
    if floor is not None:
        shown = ", ".join(f"{way} {ms:.2f}" for way, ms in floor.items())
        print(f"writing to {options.streams} sockets alone, ms of CPU: {shown}")


async def _measure(
    options: argparse.Namespace, watch: Stopwatch | None, announces: bool = False
) -> Figures:
    executor = VirtualDevice(options, watch, announces=announces)
    path = resolve_model(None).path
    info = EngineInfo("fake", "fake", "fake", (), "fake", executor.capacity.max_model_len,
                      executor.capacity.vocab_size, 0, "0", {"device": "cpu"})  # fmt: skip
    config = EngineConfig.from_flags({"max_running_requests": options.streams})
    parts = Parts(executor, load_tokenizer(path), info, options.streams, -1, config)
    async with Engine(parts) as engine:
        if watch is not None:
            _attach(watch, engine, executor)
        _count_deltas(engine, executor)
        gc.collect()
        gc.freeze()
        await (_over_http if options.http else _in_process)(engine, options)
    assert executor.figures is not None, "never did every stream decode"
    return executor.figures


def _attach(watch: Stopwatch, engine: Engine, executor: VirtualDevice) -> None:
    """`write` holds what the event loop does between two slices: there, queued bytes leave."""
    watch.attach("schedule", engine.scheduler, "schedule")
    watch.attach("fill", executor, "pack")
    watch.attach("launch", executor, "launch")
    watch.attach("fake", executor, "run_until")
    watch.attach("update", engine.scheduler, "update")
    for name in ("push", "finish"):
        watch.attach("detokenize", TextStream, name)
    loop = engine._loop
    setattr(loop, "_write_out", watch.wrap_async("write", loop._write_out))  # noqa: B010


def _count_deltas(engine: Engine, executor: VirtualDevice) -> None:
    deliver = engine._outbox._deliver_one

    def counted(request: Request) -> None:
        executor.num_deltas += 1
        deliver(request)

    setattr(engine._outbox, "_deliver_one", counted)  # noqa: B010


def _length(number: int, tokens: int) -> int:
    """One stream outlives the others: the step that follows theirs ends what is measured."""
    return tokens + (number == 0)


async def _in_process(engine: Engine, options: argparse.Namespace) -> None:
    left = options.streams
    done = asyncio.get_running_loop().create_future()

    def sink(delta: RequestOutput) -> None:
        nonlocal left
        left -= delta.finish_reason is not None
        if not left:
            done.set_result(None)

    for number in range(options.streams):
        params = SamplingParams(_length(number, options.tokens), ignore_eos=True)
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
        "prompt": [number + 100] * PROMPT_TOKENS, "max_tokens": _length(number, tokens),
        "ignore_eos": True, "stream": True,
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
