"""From logits to tokens without a host sync and without sorting.

Knows rows of logits only. A token is kept when its logit reaches the row's threshold; whether a
threshold keeps too many is monotone, so 8 passes find it bit by bit, 4 bits each, exactly.
A draw is the largest of the kept tokens' logits plus noise keyed by (seed, position, token), as
`treadle.kernels.sampling` makes it, so a row never depends on its neighbours.

Axes: N rows, V vocabulary, C chunks of a row, B bins of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.kernels.gpu.summary import (
    Summary,
    inverse_temperature,
    row_mass,
    row_peak,
    summarize,
    weigh,
)

_BINS = tl.constexpr(16)
_LEVELS = tl.constexpr(8)
_PART = tl.constexpr(256)  # logits compared with all bins at once
_LOWEST = tl.constexpr(-0x7F800001)  # the key of -inf
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)  # 2^64 / golden ratio, as a signed 64-bit number
_MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)  # splitmix64's multipliers (Steele, Lea, Flood 2014)
_MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)


@dataclass(frozen=True, slots=True)
class Filters:
    """What narrows each row's choice: `treadle.kernels.reference_sampling.kept`."""

    top_k: Tensor  # [N] int32, at least 1; V or more: off
    top_p: Tensor  # [N] fp32; 1 or more: off
    min_p: Tensor  # [N] fp32; 0: off


def sample(
    logits: Tensor,  # [N, V] ids contiguous
    temperature: Tensor | None,  # [N] fp32, 0 for a greedy row; None when every row is greedy
    seeds: Tensor,  # [N] int64
    positions: Tensor,  # [N] int64
    filters: Filters | None = None,
    out: Tensor | None = None,  # [N] int64
) -> Tensor:  # [N] int64
    """The likeliest token where temperature is 0 (of equals the lowest id), else a draw."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if not rows:
        return tokens
    summary = summarize(logits, temperature)
    best, best_id = summary.peak, summary.peak_id
    if temperature is not None:
        is_filtered = filters is not None
        threshold = best if filters is None else _narrow(logits, temperature, filters, summary)
        best, best_id = torch.empty_like(best), torch.empty_like(best_id)
        draw_kernel[(rows, summary.chunks)](
            logits, temperature, threshold, seeds, positions, summary.peak, summary.peak_id,
            best, best_id, logits.stride(0), VOCAB=vocab, CHUNK=summary.chunk,
            BLOCK=summary.chunks_block, FILTERED=is_filtered, num_warps=8,
        )  # fmt: skip
    pick_kernel[(rows,)](
        best, best_id, tokens, summary.chunks, BLOCK=summary.chunks_block, num_warps=1
    )
    return tokens


def _narrow(
    logits: Tensor, temperature: Tensor, filters: Filters, summary: Summary
) -> Tensor:  # [N] fp32 what a kept token's logit reaches
    rows, vocab = logits.shape
    device, bins = logits.device, (2, rows, summary.chunks, _BINS.value)
    low = torch.empty(_LEVELS.value, rows, dtype=torch.int64, device=device)
    above = torch.empty(bins, dtype=torch.int32, device=device)
    above_mass = torch.empty(bins, dtype=torch.float32, device=device)
    threshold = torch.empty(rows, dtype=torch.float32, device=device)
    limits = (temperature, filters.top_k, filters.top_p, summary.peak, summary.mass)
    for level in range(_LEVELS.value):
        narrow_kernel[(rows, summary.chunks)](
            logits, *limits, low, above, above_mass, logits.stride(0), level,
            VOCAB=vocab, CHUNK=summary.chunk, BLOCK=summary.chunks_block,
            IS_FIRST=level == 0, num_warps=4,
        )  # fmt: skip
    threshold_kernel[(rows,)](
        *limits, filters.min_p, low, above, above_mass, threshold, summary.chunks,
        VOCAB=vocab, BLOCK=summary.chunks_block, num_warps=4,
    )  # fmt: skip
    return threshold


@triton.jit(do_not_specialize=["level"])
def narrow_kernel(
    logits: tl.tensor,  # [N, V]
    temperature: tl.tensor,  # [N]
    top_k: tl.tensor,  # [N]
    top_p: tl.tensor,  # [N]
    peak: tl.tensor,  # [N, C]
    mass: tl.tensor,  # [N, C]
    low: tl.tensor,  # [levels, N] where each level's bins begin; this level's written
    above: tl.tensor,  # [2, N, C, B] tokens above a bin; this level's half written
    above_mass: tl.tensor,  # [2, N, C, B]
    stride: tl.tensor,
    level: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FIRST: tl.constexpr,
) -> None:
    """Grid: rows, chunks. Settles the bin of the level before, then counts above each new bin."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, chunks = tl.num_programs(0), tl.num_programs(1)
    if not _is_narrowed(n, temperature, top_k, top_p, VOCAB):
        return
    rate = inverse_temperature(temperature + n, True)
    highest, peaks = row_peak(peak + n * chunks, chunks, BLOCK)
    begin = tl.full([], -(2**31), tl.int64)
    if not IS_FIRST:
        total = tl.sum(row_mass(mass + n * chunks, peaks, highest, rate, chunks, BLOCK), 0)
        begin = _settle(n, level - 1, low, above, above_mass, top_k, top_p, total, BLOCK, chunks)
    if c == 0:
        tl.store(low + level * rows + n, begin)
    width = tl.full([], 1, tl.int64) << (4 * (_LEVELS - 1 - level))
    bins = tl.arange(0, _BINS)
    pivot = (begin + (bins + 1) * width - 1).to(tl.int32)
    count = tl.zeros([_BINS], tl.int32)
    weight = tl.zeros([_BINS], tl.float32)
    for part in range(c * CHUNK, c * CHUNK + CHUNK, _PART):
        token = part + tl.arange(0, _PART)
        x = tl.load(logits + n * stride + token, mask=token < VOCAB, other=float("-inf"))
        x = x.to(tl.float32)
        higher = (_key(x)[:, None] > pivot[None, :]) & (token < VOCAB)[:, None]
        count += tl.sum(higher.to(tl.int32), 0)
        weight += tl.sum(tl.where(higher, weigh(x, highest, rate)[:, None], 0.0), 0)
    at = (((level % 2) * rows + n) * chunks + c) * _BINS + bins
    tl.store(above + at, count)
    tl.store(above_mass + at, weight)


@triton.jit(do_not_specialize=["chunks"])
def threshold_kernel(
    temperature: tl.tensor,  # as narrow_kernel's
    top_k: tl.tensor,
    top_p: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    min_p: tl.tensor,  # [N]
    low: tl.tensor,
    above: tl.tensor,
    above_mass: tl.tensor,
    threshold: tl.tensor,  # [N] written
    chunks: tl.tensor,  # C
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: rows. The last bin is the threshold, unless min-p asks for more."""
    n = tl.program_id(0).to(tl.int64)
    rate = inverse_temperature(temperature + n, True)
    highest, peaks = row_peak(peak + n * chunks, chunks, BLOCK)
    least = highest + tl.log2(tl.load(min_p + n)) / rate
    if _is_narrowed(n, temperature, top_k, top_p, VOCAB):
        total = tl.sum(row_mass(mass + n * chunks, peaks, highest, rate, chunks, BLOCK), 0)
        last: tl.constexpr = _LEVELS - 1
        key = _settle(n, last, low, above, above_mass, top_k, top_p, total, BLOCK, chunks)
        least = tl.maximum(least, _value(key))
    tl.store(threshold + n, least)


@triton.jit
def draw_kernel(
    logits: tl.tensor,  # [N, V]
    temperature: tl.tensor,  # [N]
    threshold: tl.tensor,  # [N] read when FILTERED
    seeds: tl.tensor,  # [N]
    positions: tl.tensor,  # [N]
    peak: tl.tensor,  # [N, C]
    peak_id: tl.tensor,  # [N, C]
    best: tl.tensor,  # [N, C] written: the largest score of every chunk, and its id
    best_id: tl.tensor,  # [N, C] written
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
) -> None:
    """Grid: rows, chunks. A greedy row's scores are its logits."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    at = n * chunks + c
    highest, _ = row_peak(peak + n * chunks, chunks, BLOCK)
    t = tl.load(temperature + n)
    # a peak that is not finite leaves no differences to draw by
    if (t > 0) & (tl.abs(highest) < float("inf")):
        token = c * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + n * stride + token, mask=token < VOCAB, other=float("-inf"))
        x = x.to(tl.float32)
        row = _mix(_mix(tl.load(seeds + n)) + tl.load(positions + n) * _GOLDEN)
        score = tl.div_rn(x - highest, t) + _gumbel(row, token)
        least = tl.load(threshold + n) if FILTERED else float("-inf")
        score = tl.where(x >= least, score, float("-inf"))  # a NaN is not kept either
        largest = tl.max(score, 0)
        first = tl.min(tl.where((score == largest) & (token < VOCAB), token, VOCAB - 1), 0)
        tl.store(best + at, largest)
        tl.store(best_id + at, first)
    else:
        tl.store(best + at, tl.load(peak + at))
        tl.store(best_id + at, tl.load(peak_id + at))


@triton.jit(do_not_specialize=["chunks"])
def pick_kernel(
    best: tl.tensor,  # [N, C]
    best_id: tl.tensor,  # [N, C]
    tokens: tl.tensor,  # [N] written
    chunks: tl.tensor,  # C
    BLOCK: tl.constexpr,
) -> None:
    """Grid: rows. The id of the best chunk, of equals the first."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    highest, values = row_peak(best + n * chunks, chunks, BLOCK)
    holder = tl.min(tl.where((values == highest) & (c < chunks), c, chunks - 1), 0)
    tl.store(tokens + n, tl.load(best_id + n * chunks + holder).to(tl.int64))


@triton.jit
def _settle(
    n: tl.tensor,
    level: tl.tensor,
    low: tl.tensor,
    above: tl.tensor,
    above_mass: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    total: tl.tensor,
    BLOCK: tl.constexpr,
    chunks: tl.tensor,
) -> tl.tensor:  # int64: where the level's lowest bin that keeps few enough begins
    rows = tl.num_programs(0)
    c, bins = tl.arange(0, BLOCK)[:, None], tl.arange(0, _BINS)[None, :]
    at = (((level % 2) * rows + n) * chunks + c) * _BINS + bins
    count = tl.sum(tl.load(above + at, mask=c < chunks, other=0), 0)
    weight = tl.sum(tl.load(above_mass + at, mask=c < chunks, other=0.0), 0)
    p = tl.load(top_p + n)
    limit = tl.where(p < 1, p * total, float("inf"))
    fits = (count < tl.load(top_k + n)) & ((count == 0) | (weight < limit))
    chosen = tl.min(tl.where(fits, tl.arange(0, _BINS), _BINS - 1), 0)
    width = tl.full([], 1, tl.int64) << (4 * (_LEVELS - 1 - level))
    return tl.load(low + level * rows + n) + chosen * width


@triton.jit
def _is_narrowed(
    n: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB: tl.constexpr,
) -> tl.tensor:
    is_limited = (tl.load(top_k + n) < VOCAB) | (tl.load(top_p + n) < 1)
    return is_limited & (tl.load(temperature + n) > 0)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """int32 that orders as the numbers do; zeros of either sign are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key: tl.tensor) -> tl.tensor:
    """The number of a key; what lies below every number is -inf."""
    bits = tl.maximum(key, _LOWEST).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel(
    row: tl.tensor,  # hash of seed and position
    token: tl.tensor,
) -> tl.tensor:
    """Standard Gumbel noise, as `treadle.kernels.sampling.gumbel`."""
    mixed = _mix(row + token.to(tl.int64) * _GOLDEN)
    v = (((mixed >> 33) & 0x7FFFFFFF).to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, 1 - 2.0**-24)
    # -log1p(-v): what rounding 1 - v loses is known, and given back (Kahan)
    rest = 1 - v
    given_back = tl.div_rn(v, tl.where(rest < 1, 1 - rest, 1.0))
    return -tl.log(tl.where(rest < 1, -tl.log(rest) * given_back, v))


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = value + _GOLDEN
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)
