"""Whether memory really goes back to the system, and everything works after it has returned.

Knows tags and free bytes; never how memory is mapped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from treadle.graphs.buckets import Buckets
from treadle.graphs.step import MEMORY_TAGS, MemoryTag, StepResult
from treadle.perf.gpu.player import Work, play
from treadle.perf.gpu.rig import Rig, Room
from treadle.perf.gpu.sections import Failed, Setting, Unit, Unmeasured, Values
from treadle.perf.gpu.shapes import QWEN3_600M, SMALL

_CASES: tuple[tuple[MemoryTag, ...], ...] = (("kv_cache",), ("weights",), MEMORY_TAGS)


def units(setting: Setting) -> Sequence[Unit]:
    return [Unit(" + ".join(tags), partial(cycle, setting, tags)) for tags in _CASES]


def cycle(setting: Setting, tags: tuple[MemoryTag, ...]) -> Values:
    return asyncio.run(_cycle(setting, tags))


async def _cycle(setting: Setting, tags: tuple[MemoryTag, ...]) -> Values:
    shape, tokens = (SMALL, 2048) if setting.is_tiny else (QWEN3_600M, 65_536)
    room = Room(4, tokens, Buckets((1, 4), (16, 64)))
    try:
        rig = Rig(shape.spec, room, setting.device, memory_saver=True)
    except RuntimeError as error:
        if "pip install" in str(error):
            raise Unmeasured(str(error)) from error
        raise
    try:
        rig.executor.prepare(all_graphs=True)
        prompts = [rig.player.tokens(count) for count in (9, 30, 4)]
        before = await _answer(rig, prompts)
        free = [rig.device.free_bytes()]
        await rig.executor.release(tags)
        free.append(rig.device.free_bytes())
        await rig.executor.resume(tags)
        rig.executor.prepare(all_graphs=True)
        free.append(rig.device.free_bytes())
        after = await _answer(rig, prompts)
    finally:
        await rig.close()
    held = sum(rig.arena.allocated_bytes(tag) for tag in tags)
    values: Values = {
        "held_gb": held / 1e9,
        "freed_gb": (free[1] - free[0]) / 1e9,
        "lost_gb": (free[0] - free[2]) / 1e9,
        "tokens": sum(len(row) for row in before),
    }
    if before != after:
        raise Failed("the answers differ after the release", values)
    if setting.device != "cpu" and free[1] - free[0] < held:
        raise Failed("less was freed than was held", values)
    return values


async def _answer(rig: Rig, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens of fresh prompts, by step."""
    for slot in range(len(prompts)):
        rig.player.restart(slot)
    rows = [Work(slot, prompt) for slot, prompt in enumerate(prompts)]
    steps = [rig.player.step(rows)]
    steps += [rig.player.step([Work(slot) for slot in range(len(prompts))]) for _ in range(20)]
    results: list[StepResult] = await play(rig.executor, steps)
    return [result.token_ids[:, 0].tolist() for result in results]
