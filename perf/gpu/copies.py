"""How fast KV pages move between device and host memory, beside a plain copy of as many bytes.

Knows pools and pages; never why a page moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch

from treadle.graphs.arena import open_arena
from treadle.kernels.page_copy import DevicePool, Direction, Layout, copy_pages, host_pool
from treadle.perf.gpu.roofline import time_s
from treadle.perf.gpu.sections import Failed, Setting, Unit, Values
from treadle.perf.gpu.shapes import LLAMA_8B, SMALL

_PAGE_SIZE = 16


def units(setting: Setting) -> Sequence[Unit]:
    copies = [
        Unit(f"{layout} {direction}", partial(pages, setting, layout, direction))
        for layout in get_args(Layout)
        for direction in get_args(Direction)
    ]
    mapped = Unit(
        "page_first to_host, memory saver", partial(pages, setting, "page_first", "to_host", True)
    )
    return [*copies, mapped]


def pages(
    setting: Setting, layout: Layout, direction: Direction, memory_saver: bool = False
) -> Values:
    """Every second page of the cache, in random order, to random places and back."""
    is_gpu = setting.device != "cpu"
    spec, count = (SMALL.spec, 4) if setting.is_tiny else (LLAMA_8B.spec, 192)
    device = torch.device(setting.device, 0) if is_gpu else torch.device("cpu")
    arena = open_arena(device, memory_saver)
    size = (2 * count * _PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
    layers = [
        tuple(arena.empty("kv_cache", size, torch.bfloat16).normal_() for _ in range(2))
        for _ in range(spec.num_layers)
    ]
    pool = DevicePool.of([(k, v) for k, v in layers])
    host = host_pool(layout, count, _PAGE_SIZE, pool.layers, pin=is_gpu)
    host.data.normal_() if direction == "to_device" else host.data.zero_()
    ids = torch.randperm(2 * count)[:count].to(device)
    places = torch.randperm(count).to(device)
    copy = partial(copy_pages, direction, pool, host, ids, places)
    seconds = time_s(copy, setting.device)
    num_bytes = 2 * spec.num_layers * count * _PAGE_SIZE * math.prod(size[1:]) * 2
    plain = _plain_s(setting.device, num_bytes, direction)
    values: Values = {
        "mb": num_bytes / 1e6,
        "gb_s": num_bytes / seconds / 1e9,
        "plain_gb_s": num_bytes / plain / 1e9,
        "of_plain": plain / seconds,
    }
    for index in (0, spec.num_layers - 1):
        for kind in (0, 1):
            cache = pool.layers[index][kind].view(-1, _PAGE_SIZE, *size[1:])[ids].cpu()
            if not torch.equal(cache, host.by_layer[kind, index][places.cpu()]):
                raise Failed(f"layer {index} does not hold what was copied", values)
    return values


def _plain_s(device: str, num_bytes: int, direction: Direction) -> float:
    """One copy between the device and pinned memory."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    source, target = (there, here) if direction == "to_host" else (here, there)
    return time_s(lambda: target.copy_(source, non_blocking=True), device)
