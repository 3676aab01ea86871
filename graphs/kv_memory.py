"""Paged KV memory and the tables that find it, for one rank.

Knows sizes and tensors; never a request or a plan's meaning. One page beyond the last is scratch:
padded rows write there and nobody reads it.

Axes: N token slots of a group (pages x page size, scratch page included), K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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

    def __init__(
        self, shape: KvShape, group: KvGroup, capacity: Capacity, device: torch.device
    ) -> None:
        self.group = group
        slots = (group.pages + 1) * group.page_size
        size = (slots, shape.num_kv_heads, shape.head_dim)
        # left as the allocator gives it: the host commits a page of memory when it is written
        self.layers: list[LayerCache] = [
            (
                torch.empty(size, dtype=shape.dtype, device=device),
                torch.empty(size, dtype=shape.dtype, device=device),
            )
            for _ in range(shape.num_layers)
        ]
        width = -(-capacity.max_model_len // group.page_size)
        self.page_table = torch.full(
            (capacity.slots, width), group.pages, dtype=torch.int32, device=device
        )
