"""What background capture costs those who are being served: the same traffic during and after it.

Streams with arrivals spread over a few seconds run twice on one engine: first with only the graph
that start-up makes, then with all of them. Compared are the gaps between a stream's tokens and how
late the event loop wakes up.

    python -m treadle.perf.capture_bench
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treadle.engine import Engine
from treadle.engine.interpreter import own_interpreter

PROBE_S = 0.005
WORDS = "river stone window garden letter music winter bread silver ocean".split()


@dataclass
class Round:
    """Gaps of one round, in milliseconds."""

    token_gaps: list[float] = field(default_factory=list)
    loop_delays: list[float] = field(default_factory=list)
    graphs_before: int = 0
    graphs_after: int = 0

    def summary(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"graphs": [self.graphs_before, self.graphs_after]}
        for name in ("token_gaps", "loop_delays"):
            values = np.array(getattr(self, name))
            figures[name] = {
                "p50": float(np.percentile(values, 50)),
                "p99": float(np.percentile(values, 99)),
                "max": float(values.max()),
            }
        return figures


def count_graphs(engine: Engine) -> int:
    return sum(len(sizes) for sizes in engine.load().graphs.captured.values())


def planned_graphs(engine: Engine) -> int:
    return sum(engine.load().graphs.planned.values())


async def _probe(delays: list[float]) -> None:
    while True:
        due = time.perf_counter() + PROBE_S
        await asyncio.sleep(PROBE_S)
        delays.append(1e3 * (time.perf_counter() - due))


async def _stream(engine: Engine, rng: random.Random, gaps: list[float]) -> None:
    prompt = " ".join(rng.choices(WORDS, k=rng.randint(5, 60)))
    tokens = rng.randint(30, 80)
    last: float | None = None
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    async for _ in engine.stream(prompt, params):
        now = time.perf_counter()
        if last is not None:
            gaps.append(1e3 * (now - last))
        last = now


async def play(engine: Engine, streams: int, spread_s: float, seed: int) -> Round:
    """The traffic of one round."""
    rng = random.Random(seed)
    found = Round(graphs_before=count_graphs(engine))
    probe = asyncio.create_task(_probe(found.loop_delays))

    async def later(delay_s: float, own: random.Random) -> None:
        await asyncio.sleep(delay_s)
        await _stream(engine, own, found.token_gaps)

    plans = [(rng.uniform(0, spread_s), random.Random(rng.random())) for _ in range(streams)]
    await asyncio.gather(*(later(*plan) for plan in plans))
    probe.cancel()
    found.graphs_after = count_graphs(engine)
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    flags = {} if options.model_path is None else {"model_path": options.model_path}
    engine = await Engine.create(**flags, disable_radix_cache=True)
    during = await play(engine, options.streams, options.spread, seed=1)
    while count_graphs(engine) < planned_graphs(engine):
        await asyncio.sleep(0.1)
    after = await play(engine, options.streams, options.spread, seed=1)
    await engine.shutdown()
    result: dict[str, Any] = {"during": during.summary(), "after": after.summary()}
    result["p99 ratio"] = {
        name: result["during"][name]["p99"] / result["after"][name]["p99"]
        for name in ("token_gaps", "loop_delays")
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", help="default: the embedded model")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--spread", type=float, default=8.0, help="seconds between first and last")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    own_interpreter()  # as the server does
    result = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(result))
        return
    for name in ("during", "after"):
        figures = result[name]
        print(f"{name:7} graphs {figures['graphs'][0]} -> {figures['graphs'][1]}")
        for kind in ("token_gaps", "loop_delays"):
            shown = ", ".join(f"{k} {v:.1f}" for k, v in figures[kind].items())
            print(f"        {kind} ms: {shown}")
    for kind, ratio in result["p99 ratio"].items():
        print(f"{kind}: p99 during is {ratio:.2f} x p99 after")


if __name__ == "__main__":
    main()
