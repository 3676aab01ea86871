"""Whether replayed graphs compute what the same code computes eagerly, bit for bit.

Knows the twin executors only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from treadle.perf.gpu.rig import Rig, Room
from treadle.perf.gpu.sections import Setting, Unit, Values
from treadle.perf.gpu.shapes import SMALL
from treadle.perf.gpu.twin import BUCKETS, Twin

CAPTURE_S = 60.0


def units(setting: Setting) -> Sequence[Unit]:
    cases = [("bfloat16", 1), ("bfloat16", 16), ("float32", 3)]
    ahead = Unit("compile ahead", partial(compile_ahead, setting.device))
    return [ahead] + [
        Unit(f"{dtype}, pages of {page_size}", partial(replay, setting.device, dtype, page_size))
        for dtype, page_size in cases
    ]


def compile_ahead(device: str) -> Values:
    """Everything that a small model's steps launch, compiled in worker threads."""
    rig = Rig(SMALL.spec, Room(8, 256, BUCKETS), device)
    try:
        return rig.compile_ahead()
    finally:
        asyncio.run(rig.close())


def replay(device: str, dtype: str, page_size: int) -> Values:
    """While graphs are swapped in, then every graph, mixed steps, and long decodes."""
    return asyncio.run(_replay(Twin(replace(SMALL.spec, dtype=dtype), device, page_size)))


async def _replay(twin: Twin) -> Values:
    try:
        swapped = await twin.while_capturing(CAPTURE_S)
        await twin.every_graph()
        await twin.mixed(12)
        await twin.long_decodes(40)
    finally:
        await twin.close()
    return {
        **twin.compiled,
        "steps": twin.num_steps,
        "replayed": twin.num_replayed,
        "eager_while_capturing": swapped["eager"],
        "graphs": swapped["graphs"],
    }
