"""Causal attention over a paged cache: one query a row with split keys, longer rows in tiles.

Knows slots, pages and lengths; the launch shapes follow from tensor sizes and bounds, never from
a length that only the device knows.

Axes: T tokens, R rows, H query heads, K kv heads, G = H / K, D head dim, N token slots, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels.gpu.decode_attention import decode_attention
from treadle.kernels.gpu.prefill_attention import prefill_attention
from treadle.kernels.paged_attention import AttentionMeta


def paged_attention(
    q: Tensor,  # [T, H, D] features contiguous
    k_cache: Tensor,  # [N, K, D] features contiguous; H is a multiple of K
    v_cache: Tensor,  # [N, K, D] features contiguous
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,  # [T, H, D] q's dtype, contiguous
    sinks: Tensor | None = None,  # [H] fp32: a logit that takes weight and gives no value
    softcap: float | None = None,  # scores become softcap * tanh(score / softcap)
) -> Tensor:  # [T, H, D] out, or a new one
    """As `treadle.kernels.paged_attention.paged_attention`.

    Rows of one query go through the decode kernel also in a mixed batch: a long context is then
    still split over many programs.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = meta.seq_lens.shape[0]
    if not q.numel() or not rows:
        return out
    arguments = (q, k_cache, v_cache, meta, scale, window, sinks, softcap, out)
    if meta.max_q_len > 1:
        prefill_attention(*arguments, skip_single=rows > 1)
    if meta.max_q_len == 1 or rows > 1:
        decode_attention(*arguments)
    return out
