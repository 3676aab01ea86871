"""Paged KV memory and the tables that find it, for one rank.

Knows sizes and tensors; never a request or a plan's meaning. One page beyond the last is scratch:
padded rows write and read there, and nobody uses what they make of it.

Axes: N token slots of a group (pages x page size, scratch page included), K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treadle.graphs.arena import Arena
from treadle.graphs.step import Capacity, KvGroup

LayerCache = tuple[torch.Tensor, torch.Tensor]  # keys, values: [N, K, D]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's KV is made of."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvMemory:
    """Key and value tensors of every layer, and a page table row per slot."""

    def __init__(self, shape: KvShape, group: KvGroup, capacity: Capacity, arena: Arena) -> None:
        """Pages are left as the arena gives them, except for the scratch page."""
        self.group = group
        size = ((group.pages + 1) * group.page_size, shape.num_kv_heads, shape.head_dim)
        self.layers: list[LayerCache] = [
            (arena.empty("kv_cache", size, shape.dtype), arena.empty("kv_cache", size, shape.dtype))
            for _ in range(shape.num_layers)
        ]
        self.scratch_slot = capacity.slots
        width = -(-capacity.max_model_len // group.page_size)
        # [slots + 1, width]; the scratch slot's row is all scratch page, for rows that only pad
        self.page_table = arena.empty("tables", (capacity.slots + 1, width), torch.int32)
        self.clear_scratch()
        self.reset()

    def clear_scratch(self) -> None:
        """Makes the scratch page finite. To be called again once `kv_cache` is resumed."""
        for k, v in self.layers:
            k[-self.group.page_size :].zero_()
            v[-self.group.page_size :].zero_()

    def reset(self) -> None:
        """Points every slot to the scratch page."""
        self.page_table.fill_(self.group.pages)
