"""Speed of whole steps of real model shapes, eager beside graphs: decode, prefill, launches.

Knows rigs and roofs. Contexts are set, not computed: what the cache holds changes no time.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from treadle.graphs.buckets import Buckets
from treadle.graphs.step import Step
from treadle.perf.gpu.player import Work, play
from treadle.perf.gpu.rig import Rig, Room
from treadle.perf.gpu.roofline import peaks
from treadle.perf.gpu.sections import Failed, Setting, Unit, Values
from treadle.perf.gpu.shapes import LLAMA_8B, QWEN3_600M, SMALL, ModelShape, count_parameters

AIM_MS = 1.0  # of the launch thread for a step
_WARM = 4  # steps before those that count


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of every shape."""

    shapes: tuple[ModelShape, ...]
    batches: tuple[int, ...]
    context: int  # tokens before a decode
    decodes: int  # steps
    prefills: tuple[tuple[int, int], ...]  # rows, tokens of each
    prefill_steps: int
    launches: int  # steps, one at a time

    @property
    def room(self) -> Room:
        most = max(self.batches)
        tokens = [rows * count for rows, count in self.prefills]
        decoded = most * (self.context + 4 * self.decodes + 64)
        return Room(most, max(decoded, *tokens) + 16 * most, Buckets(self.batches, tuple(tokens)))


FULL = Load(
    (QWEN3_600M, LLAMA_8B), (1, 8, 64, 256), 512, 48, ((1, 512), (4, 512), (1, 8192)), 6, 15
)
TINY = Load((SMALL,), (1, 4), 24, 6, ((1, 8), (2, 16)), 3, 3)


def units(setting: Setting) -> Sequence[Unit]:
    sys.setswitchinterval(0.0005)  # as the engine does where it owns the process
    load = TINY if setting.is_tiny else FULL
    bench = Bench(load, setting.device)
    found = [Unit("peaks", lambda: peaks(setting.device).values())]
    for shape in load.shapes:
        name = shape.name
        found.append(Unit(f"{name} graphs", partial(bench.run, shape, graphs)))
        for batch in load.batches:
            found.append(Unit(f"{name} decode {batch}", partial(bench.run, shape, decode, batch)))
        for rows, count in load.prefills:
            measured = partial(bench.run, shape, prefill, rows, count)
            found.append(Unit(f"{name} prefill {rows} x {count}", measured))
        for kind in ("decode", "prefill", "mixed"):
            found.append(Unit(f"{name} launch {kind}", partial(bench.run, shape, launch, kind)))
    return found


class Bench:
    """One rig at a time: weights of two shapes need not fit together."""

    def __init__(self, load: Load, device: str) -> None:
        self.load, self.device = load, device
        self.rig: Rig | None = None
        self.built: Values = {}

    def run(
        self, shape: ModelShape, measure: Callable[..., Awaitable[Values]], *arguments: object
    ) -> Values:
        return asyncio.run(self._run(shape, measure, *arguments))

    async def _run(
        self, shape: ModelShape, measure: Callable[..., Awaitable[Values]], *arguments: object
    ) -> Values:
        if self.rig is None or self.rig.spec is not shape.spec:
            if self.rig is not None:
                await self.rig.close()
            self.rig = None  # before the next one is built
            gc.collect()  # the probe's wrappers are cycles
            started = time.perf_counter()
            self.rig = Rig(shape.spec, self.load.room, self.device)
            self.built = {"build_s": time.perf_counter() - started}
            self.built |= self.rig.try_compile_ahead()
            self.rig.executor.prepare(all_graphs=True)
        return await measure(self, self.rig, *arguments)

    def rate(self, num_bytes: float, seconds: float) -> float:
        """Of the measured bandwidth."""
        return num_bytes / seconds / peaks(self.device).bytes_per_s


async def graphs(bench: Bench, rig: Rig) -> Values:
    """How long captures took, and the memory that they take."""
    report = rig.executor.graphs()
    by_kind = defaultdict(list)
    for key, seconds in rig.probe.capture_s.items():
        by_kind[key.kind].append(1e3 * seconds)
    values: Values = {f"{kind}_ms": statistics.median(ms) for kind, ms in by_kind.items()}
    values |= bench.built | {
        "graphs": len(rig.probe.capture_s),
        "seconds": sum(rig.probe.capture_s.values()),
        "worst_ms": 1e3 * max(rig.probe.capture_s.values(), default=0.0),
        "graph_mb": report.num_bytes / 1e6,
    }
    if rig.probe.not_captured:
        key, reason = next(iter(rig.probe.not_captured.items()))
        raise Failed(f"{len(rig.probe.not_captured)} not captured, {key}: {reason}", values)
    return values


async def decode(bench: Bench, rig: Rig, batch: int) -> Values:
    """Tokens per second with the executor's depth in flight; the share of the bandwidth."""
    weights = count_parameters(rig.spec)["read"] * rig.dtype.itemsize
    context = rig.kv_bytes_per_token * (bench.load.context + bench.load.decodes / 2)
    values: Values = {}
    rows, count = [Work(slot) for slot in range(batch)], bench.load.decodes
    for name in ("eager", "graphs"):
        _set_context(rig, batch, bench.load.context)
        seconds, idle_ms = await _timed(rig, lambda: rig.player.step(rows), count, name)
        values |= {
            f"{name}_tokens_s": batch * count / seconds,
            f"{name}_ms": 1e3 * seconds / count,
            f"{name}_of_bandwidth": bench.rate((weights + batch * context) * count, seconds),
            f"{name}_idle": idle_ms / 1e3 / seconds,
        }
    return values


async def prefill(bench: Bench, rig: Rig, rows: int, count: int) -> Values:
    """Tokens per second of fresh prompts; the share of bf16's peak, attention left out."""
    values: Values = {}
    flops = 2 * count_parameters(rig.spec)["layers"] * rows * count

    def step() -> Step:
        for slot in range(rows):
            rig.player.restart(slot)
        return rig.player.step([Work(slot, rig.player.tokens(count)) for slot in range(rows)])

    for name in ("eager", "graphs"):
        steps = bench.load.prefill_steps
        seconds, idle_ms = await _timed(rig, step, steps, name)
        values |= {
            f"{name}_tokens_s": rows * count * steps / seconds,
            f"{name}_ms": 1e3 * seconds / steps,
            f"{name}_of_peak": flops * steps / seconds / peaks(bench.device).bf16_flops,
            f"{name}_idle": idle_ms / 1e3 / seconds,
        }
    return values


async def launch(bench: Bench, rig: Rig, kind: str) -> Values:
    """What a step costs the launch thread when the device is free: nothing waits."""
    batch = sorted(bench.load.batches)[len(bench.load.batches) // 2]
    rows, count = bench.load.prefills[0]
    values: Values = {"aim_ms": AIM_MS}

    def step() -> Step:
        if kind == "prefill":
            for slot in range(rows):
                rig.player.restart(slot)
            return rig.player.step([Work(s, rig.player.tokens(count)) for s in range(rows)])
        work = [Work(slot) for slot in range(batch if kind == "decode" else batch - 1)]
        if kind == "mixed":
            rig.player.restart(batch - 1)
            chunk = rig.player.tokens(max(1, rows * count - len(work)))
            work.append(Work(batch - 1, chunk))
        return rig.player.step(work)

    for name in ("eager", "graphs"):
        _set_context(rig, batch, bench.load.context)
        rig.probe.is_eager = name == "eager"
        spent = []
        for number in range(_WARM + bench.load.launches):
            planned = step()
            (result,) = await play(rig.executor, [planned])
            _check(result.replayed, name)
            if number >= _WARM:
                spent.append(1e3 * rig.probe.stamps[planned.seq].launch_s)
        values |= {f"{name}_ms": statistics.median(spent), f"{name}_worst_ms": max(spent)}
    return values


async def _timed(rig: Rig, step: Callable[[], Step], count: int, name: str) -> tuple[float, float]:
    """Seconds of so many steps in a row, and the device's idle milliseconds between them."""
    rig.probe.is_eager = name == "eager"
    await play(rig.executor, [step() for _ in range(_WARM)])
    steps = [step() for _ in range(count)]
    rig.device.synchronize()
    rig.probe.stamps.clear()
    started = time.perf_counter()
    results = await play(rig.executor, steps)
    seconds = time.perf_counter() - started
    rig.device.synchronize()
    for result in results:
        _check(result.replayed, name)
    return seconds, rig.probe.idle_ms()


def _check(replayed: bool, name: str) -> None:
    if replayed != (name == "graphs"):
        raise Failed(f"a step of {name} ran {'in graphs' if replayed else 'eagerly'}", {})


def _set_context(rig: Rig, batch: int, context: int) -> None:
    for slot in range(batch):
        rig.player.restart(slot, context)
