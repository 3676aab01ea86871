"""Tensor parallelism over all the GPUs that there are: the same tokens as on one, and how fast.

Knows layouts and executors; never a socket or a collective. Weights are drawn from a seed, so every
number of ranks runs the same model.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.followers import Team
from treadle.graphs.rank_model import ModelRank
from treadle.graphs.rank_plan import Allocation, Layout, RankPlan
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.step import StepResult
from treadle.perf.gpu.player import Player, Work, play
from treadle.perf.gpu.sections import Failed, Setting, Unit, Unmeasured, Values

SIZES = (2, 4, 8)
CONTEXT = 1024  # tokens that are served
_COMMON = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "rope_theta": 1_000_000.0, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A model by its published names, and what is asked of it."""

    config: Mapping[str, Any]
    rows: int
    prompt: int  # tokens
    steps: int

    @property
    def room(self) -> Allocation:
        pages = -(-self.rows * (self.prompt + 2 * self.steps + 32) // 16)
        vocab: int = self.config["vocab_size"]
        return Allocation(16, pages, self.rows, CONTEXT, vocab, 2, (self.rows,), (16, 64))


SMALL = Case(
    _COMMON | {
        "vocab_size": 1008, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 256, "dtype": "float32",
    },
    rows=3, prompt=9, steps=20,
)  # fmt: skip
QWEN3_600M = Case(
    _COMMON | {
        "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 3072, "dtype": "bfloat16",
    },
    rows=64, prompt=16, steps=48,
)  # fmt: skip


def units(setting: Setting) -> Sequence[Unit]:
    fast = SMALL if setting.is_tiny else QWEN3_600M
    found = []
    for size in SIZES[:1] if setting.is_tiny else SIZES:
        found.append(Unit(f"tp {size} tokens", partial(same_tokens, setting, size)))
        found.append(Unit(f"tp {size} decode", partial(speed, setting, size, fast)))
    return found


def same_tokens(setting: Setting, size: int) -> Values:
    """Greedy tokens in fp32, eager and replayed, of so many ranks and of one."""
    check(setting, size)
    alone, _ = measured(setting, 1, SMALL)
    shared, _ = measured(setting, size, SMALL)
    values: Values = {"tokens": sum(len(row) for row in alone)}
    if alone != shared:
        raise Failed(f"{size} ranks and one rank disagree", values)
    return values


def speed(setting: Setting, size: int, case: Case) -> Values:
    """Decode steps of so many ranks beside one rank, in one process after the other."""
    check(setting, size)
    _, alone = measured(setting, 1, case)
    _, shared = measured(setting, size, case)
    return {
        "rows": case.rows,
        "step_ms": shared,
        "alone_ms": alone,
        "tokens_s": 1e3 * case.rows / shared,
        "ratio": alone / shared,
    }


def check(setting: Setting, size: int) -> None:
    """Raises: Unmeasured when there are not as many GPUs."""
    if setting.device == "cpu":
        return
    count = torch.cuda.device_count()
    if count < size:
        raise Unmeasured(f"{size} GPUs are needed, this machine has {count}")


def measured(setting: Setting, size: int, case: Case) -> tuple[list[list[int]], float]:
    """Tokens by step, and the median milliseconds of a replayed decode."""
    return asyncio.run(_measured(setting, size, case))


async def _measured(setting: Setting, size: int, case: Case) -> tuple[list[list[int]], float]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        executor = await asyncio.to_thread(_start, setting, size, case, folder)
        try:
            player = Player(executor.capacity, seed=0)
            prompts = [Work(slot, player.tokens(case.prompt)) for slot in range(case.rows)]
            results = await play(executor, [player.step([row]) for row in prompts])
            decodes = [Work(slot) for slot in range(case.rows)]
            results += await play(executor, [player.step(decodes) for _ in range(case.steps)])
            await asyncio.to_thread(executor.prepare, True)
            times = []
            for _ in range(case.steps):
                begin = time.perf_counter()
                results += await play(executor, [player.step(decodes)])
                times.append(1e3 * (time.perf_counter() - begin))
        finally:
            await executor.close()
    return [_tokens(result) for result in results], statistics.median(times)


def _start(setting: Setting, size: int, case: Case, folder: str) -> DeviceExecutor | RankedExecutor:
    layout = Layout(size)
    plan = RankPlan(
        0, size, layout.device(setting.device, 0), "", folder, "dummy",
        case.config["dtype"], CONTEXT, num_threads=1 if setting.device == "cpu" else None,
        timeout_s=60.0, log_level="warning",
    )  # fmt: skip
    if size == 1:
        alone = ModelRank(plan, None).allocate(case.room)
        alone.start()
        return alone
    team = Team(layout, plan, setting.device)
    try:
        rank = ModelRank(team.plan, team.group)
        team.wait_loaded()
        team.allocate(case.room)
        return RankedExecutor(rank.allocate(case.room), team, watchdog_timeout_s=60.0)
    except BaseException:
        team.close(at_once=True)
        raise


def _tokens(result: StepResult) -> list[int]:
    tokens: list[int] = result.token_ids[:, 0].tolist()
    return tokens
