"""Request mixes and the closed loop that sends them: as many at a time, each followed by the next.

Knows the engine's public API only.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.engine import Completion, Engine


@dataclass(frozen=True, slots=True)
class Workload:
    """Random token ids in, greedy tokens out, end tokens ignored."""

    input_len: int  # the shared prefix included
    output_len: int
    requests: int
    concurrency: int
    seed: int = 0
    shared_prefix: int = 0  # leading tokens that all prompts have in common

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        prefix = [rng.randrange(100, 10_000) for _ in range(self.shared_prefix)]
        own = self.input_len - self.shared_prefix
        return [
            [*prefix, *(rng.randrange(100, 10_000) for _ in range(own))]
            for _ in range(self.requests)
        ]


async def run_treadle(
    load: Workload, path: Path, dtype: str, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Output tokens a second with `concurrency` requests always running.

    flags: further engine settings.
    """
    params = {"max_new_tokens": load.output_len, "temperature": 0, "ignore_eos": True}
    async with await Engine.create(model_path=str(path), dtype=dtype, **flags) as engine:
        await engine.generate(load.prompts()[0], {**params, "max_new_tokens": 4})  # warm-up
        await engine.flush_cache(timeout=10)
        waiting = iter(load.prompts())
        answers: list[Completion] = []

        async def client() -> None:
            for prompt in waiting:
                answers.append(await engine.generate(prompt, params))

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.concurrency)))
        elapsed = time.perf_counter() - started
        used = str(engine.info.server_args["dtype"])
    generated = sum(answer.completion_tokens for answer in answers)
    assert generated == load.requests * load.output_len
    return {
        "tokens_per_s": generated / elapsed,
        "dtype": used,
        "hit_rate": sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers),
        "retractions": sum(a.num_retractions for a in answers),
    }
