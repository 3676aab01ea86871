"""Attention of one layer: projections and rotation before, paged attention, projection after.

Knows pages only through AttentionMeta and slots; never a request.

Axes: T tokens, H query heads, K kv heads, D head dim, N cache slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.graphs.layers.linear import Linear
from treadle.graphs.layers.norm import RmsNorm
from treadle.graphs.layers.rotary import Rotary
from treadle.kernels.kv_store import store_kv
from treadle.kernels.paged_attention import AttentionMeta, paged_attention

KvCache = tuple[Tensor, Tensor]  # keys and values, each [N, K, D]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention. `project`, `attend` and `output` are cut apart for graph capture."""

    qkv: Linear  # [(H + 2K) * D, hidden], query rows first
    o: Linear  # [hidden, H * D]
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    rotary: Rotary
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens seen, the current one included

    def project(
        self,
        x: Tensor,  # [T, hidden] normed
        positions: Tensor,  # [T]
    ) -> tuple[Tensor, Tensor, Tensor]:  # [T, H, D], [T, K, D], [T, K, D]
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, k, positions)
        return q, k, v

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, K, D]
        v: Tensor,  # [T, K, D]
        cache: KvCache,
        slot_mapping: Tensor,  # [T] int64
        meta: AttentionMeta,
    ) -> Tensor:  # [T, H, D]
        """Writes the new keys and values into the cache, then attends over it."""
        k_cache, v_cache = cache
        store_kv(k, v, k_cache, v_cache, slot_mapping)
        return paged_attention(q, k_cache, v_cache, meta, self.head_dim**-0.5, self.window)

    def output(self, attended: Tensor) -> Tensor:  # [T, H, D] -> [T, hidden]
        return self.o(attended.flatten(1))
