"""Attention of one layer: projections and rotation before, paged attention, projection after.

Knows pages only through AttentionMeta and slots; never a request.

Axes: T tokens, H query heads, K kv heads, D head dim, N cache slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.graphs.layers.linear import Linear, Projection
from treadle.graphs.layers.norm import RmsNorm
from treadle.graphs.layers.rotary import Rotary
from treadle.kernels.kv_store import store_kv
from treadle.kernels.paged_attention import AttentionMeta

KvCache = tuple[Tensor, Tensor]  # keys and values, each [N, K, D]
Backend = Callable[..., Tensor]  # `treadle.kernels.paged_attention.paged_attention`'s arguments


@dataclass(frozen=True, slots=True)
class ByPhase:
    """One backend for steps of single queries, one for those with longer rows."""

    prefill: Backend
    decode: Backend

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMeta,
        scale: float,
        window: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        backend = self.decode if meta.max_q_len == 1 else self.prefill
        return backend(q, k_cache, v_cache, meta, scale, window, out=out)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention. `project`, `attend` and `output` are cut apart for graph capture."""

    qkv: Linear  # [(H + 2K) * D, hidden], query rows first
    o: Projection  # [hidden, H * D]
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
        positions: Tensor,  # [T] int64
        cache: KvCache,
        slot_mapping: Tensor,  # [T] int64
        q_out: Tensor,  # [T, H, D]
    ) -> None:
        """Leaves the queries in `q_out`, the new keys and values in the cache."""
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        _, k = self.rotary(q, k, positions, q_out)
        k_cache, v_cache = cache
        store_kv(k, v, k_cache, v_cache, slot_mapping)

    def attend(
        self,
        q: Tensor,  # [T, H, D]
        cache: KvCache,
        meta: AttentionMeta,
        out: Tensor,  # [T, H, D]
        backend: Backend,
    ) -> None:
        """Attention over the cache, which holds the queries' own keys and values already."""
        k_cache, v_cache = cache
        backend(q, k_cache, v_cache, meta, self.head_dim**-0.5, self.window, out=out)

    def output(self, attended: Tensor) -> Tensor:  # [T, H, D] -> [T, hidden]
        return self.o(attended.flatten(1))
