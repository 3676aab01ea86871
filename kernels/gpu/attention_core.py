"""What both attention kernels are made of: gathering pages, scoring keys, the running softmax.

Knows nothing of rows or tiles. Scores are in base 2 throughout: exp2 is what the hardware has.

Axes: M queries times heads of a tile, N keys of a block, D head dim.
Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Arguments of which a program reads single numbers: wherever they lie, the compiled kernel is one.
INDICES = ("cu_seqlens_q", "seq_lens", "req_slot", "page_table")


@triton.jit
def gather(
    cache: tl.tensor,  # at the kv head
    stride: tl.tensor,  # of a slot
    slots: tl.tensor,  # [N] int64
    feature: tl.tensor,  # [BLOCK_D]
    seen: tl.tensor,  # [N] keys that may be read
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:  # [N, BLOCK_D] zero beyond D and where not seen
    place = cache + slots[:, None] * stride + feature[None, :]
    if MASKED:
        return tl.load(place, mask=seen[:, None] & (feature < D)[None, :], other=0.0)
    if D != BLOCK_D:
        return tl.load(place, mask=(feature < D)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def slots_of(
    page_table: tl.tensor,  # the row's entries
    key: tl.tensor,  # [N] positions
    seen: tl.tensor,  # [N] entries that may be read
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:  # [N] int64
    if MASKED:
        page = tl.load(page_table + key // PAGE_SIZE, mask=seen, other=0)
    else:
        page = tl.load(page_table + key // PAGE_SIZE)
    return page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE


@triton.jit
def score(
    q: tl.tensor,  # [M, BLOCK_D]
    k: tl.tensor,  # [N, BLOCK_D]
    scale: tl.tensor,
    SOFTCAP: tl.constexpr,  # 0: none
) -> tl.tensor:  # [M, N] base 2
    product = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if SOFTCAP > 0:  # tanh(z) = 2 sigmoid(2z) - 1
        halved = tl.sigmoid(product * (scale * (2.0 / SOFTCAP))) - 0.5
        return halved * (2.0 * SOFTCAP * LOG2E)
    return product * (scale * LOG2E)


@triton.jit
def accumulate(
    scores: tl.tensor,  # [M, N] base 2, -inf where a query does not see the key
    v: tl.tensor,  # [N, BLOCK_D]
    most: tl.tensor,  # [M] largest score so far
    total: tl.tensor,  # [M] sum of weights so far, relative to `most`
    mixed: tl.tensor,  # [M, BLOCK_D] weighted values so far
    DOT_DTYPE: tl.constexpr,
) -> tl.tensor:  # the new (most, total, mixed)
    new_most = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(new_most == float("-inf"), 0.0, new_most)  # a query that has seen no key yet
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(most - base)
    total = total * fade + tl.sum(weights, 1)
    mixed = mixed * fade[:, None]
    mixed = tl.dot(weights.to(DOT_DTYPE), v.to(DOT_DTYPE), mixed, input_precision="ieee")
    return new_most, total, mixed


@triton.jit
def add_sink(
    sink: tl.tensor,  # [M] natural logit
    most: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
) -> tl.tensor:  # the new (total, mixed)
    scaled = sink * LOG2E
    new_most = tl.maximum(most, scaled)
    fade = tl.exp2(most - new_most)
    return total * fade + tl.exp2(scaled - new_most), mixed * fade[:, None]
