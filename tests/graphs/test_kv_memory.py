"""Pages, scratch and tables over an arena."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import pytest
import torch
from torch import Tensor

from treadle.graphs.arena import HostArena, Tag
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.step import Capacity, KvGroup

SHAPE = KvShape(3, 2, 8, torch.bfloat16)
MB = 1 << 20


class DirtyArena(HostArena):
    """New memory is full of NaN."""

    def empty(self, tag: Tag, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = super().empty(tag, shape, dtype)
        tensor.view(torch.uint8).fill_(255)
        return tensor


def make(arena: HostArena, page_size: int = 4, pages: int = 10, shape: KvShape = SHAPE) -> KvMemory:
    group = KvGroup("full", page_size, pages, page_size * shape.bytes_per_token)
    return KvMemory(shape, group, Capacity((group,), 5, 30, 100), arena)


@pytest.mark.parametrize("page_size", [1, 4])
def test_memory_has_one_page_and_one_slot_of_scratch(page_size: int) -> None:
    arena = HostArena()
    memory = make(arena, page_size)
    assert len(memory.layers) == 3
    for k, v in memory.layers:
        assert k.shape == v.shape == (11 * page_size, 2, 8)
        assert k.dtype is v.dtype is torch.bfloat16
    assert memory.scratch_slot == 5
    assert memory.page_table.shape == (6, -(-30 // page_size))
    assert memory.page_table.dtype is torch.int32
    assert (memory.page_table == 10).all()
    kv_bytes = 11 * page_size * SHAPE.bytes_per_token
    assert arena.allocated_bytes("kv_cache") >= kv_bytes
    assert arena.allocated_bytes("tables") >= memory.page_table.nbytes


def test_scratch_is_cleared_and_nothing_else_touched() -> None:
    memory = make(DirtyArena())
    for x in (x for layer in memory.layers for x in layer):
        assert (x[-4:] == 0).all()
        assert x[:-4].isnan().all()
        x.fill_(torch.nan)
    memory.clear_scratch()
    for x in (x for layer in memory.layers for x in layer):
        assert (x[-4:] == 0).all()
        assert x[:-4].isnan().all()


def test_reset_points_every_slot_to_scratch() -> None:
    memory = make(DirtyArena())
    assert (memory.page_table == 10).all()
    memory.page_table.random_(0, 10)
    memory.reset()
    assert (memory.page_table == 10).all()


@pytest.mark.skipif(not HostArena.can_release, reason="only Linux takes memory back")
def test_tables_survive_a_release_and_layers_keep_their_addresses() -> None:
    arena = HostArena()
    memory = make(arena)
    for x in (x for layer in memory.layers for x in layer):
        x.normal_()
    memory.page_table.random_(0, 10)
    table = memory.page_table.clone()
    places = [x.data_ptr() for layer in memory.layers for x in layer]
    arena.release("kv_cache")
    arena.resume("kv_cache")
    memory.clear_scratch()
    assert torch.equal(memory.page_table, table)
    assert [x.data_ptr() for layer in memory.layers for x in layer] == places
    for x in (x for layer in memory.layers for x in layer):
        x.copy_(values := torch.randn(x.shape).bfloat16())
        assert torch.equal(x, values)


@pytest.mark.skipif(not HostArena.can_release, reason="only Linux commits pages when written")
def test_host_pages_stay_uncommitted_until_written() -> None:
    before = psutil.Process().memory_info().rss
    shape = KvShape(4, 8, 64, torch.float32)
    memory = make(HostArena(), page_size=16, pages=1000, shape=shape)
    assert sum(x.nbytes for layer in memory.layers for x in layer) > 250 * MB
    assert psutil.Process().memory_info().rss - before < 16 * MB
