"""Whether replayed graphs compute what the same code computes eagerly, bit for bit.

Knows the twin executors only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from treadle.perf.gpu.sections import Setting, Unit, Values
from treadle.perf.gpu.shapes import SMALL
from treadle.perf.gpu.twin import Twin

CAPTURE_S = 60.0


def units(setting: Setting) -> Sequence[Unit]:
    cases = [("bfloat16", 1), ("bfloat16", 16), ("float32", 3)]
    return [
        Unit(f"{dtype}, pages of {page_size}", partial(replay, setting.device, dtype, page_size))
        for dtype, page_size in cases
    ]


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
