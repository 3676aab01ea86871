"""From logits to tokens without a host sync and without sorting.

Knows rows of logits only. A token is kept when its logit reaches the row's threshold; whether a
threshold keeps too many is monotone, so 8 passes find it bit by bit, 4 bits each, exactly.
The draw inverts the kept distribution in the order of ids; random numbers are keyed by
(seed, position), so a row never depends on its neighbours.

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
) -> Tensor:  # [N] int64
    """The likeliest token where temperature is 0 (of equals the lowest id), else a draw."""
    rows, vocab = logits.shape
    summary = summarize(logits, temperature)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    kept, threshold = summary.mass, summary.peak
    is_filtered = temperature is not None and filters is not None
    if temperature is not None and filters is not None:
        kept, threshold = _narrow(logits, temperature, filters, summary)
    draw_kernel[(rows,)](
        logits, summary.peak if temperature is None else temperature, seeds, positions,
        summary.peak, summary.peak_id, kept, threshold, tokens, logits.stride(0), summary.chunks,
        VOCAB=vocab, CHUNK=summary.chunk, BLOCK=summary.chunks_block,
        TEMPERED=temperature is not None, FILTERED=is_filtered, num_warps=8,
    )  # fmt: skip
    return tokens


def _narrow(
    logits: Tensor, temperature: Tensor, filters: Filters, summary: Summary
) -> tuple[Tensor, Tensor]:
    """The kept mass of every chunk [N, C] relative to the row's peak, and the thresholds [N]."""
    rows, vocab = logits.shape
    device, bins = logits.device, (2, rows, summary.chunks, _BINS.value)
    low = torch.empty(_LEVELS.value, rows, dtype=torch.int64, device=device)
    above = torch.empty(bins, dtype=torch.int32, device=device)
    above_mass = torch.empty(bins, dtype=torch.float32, device=device)
    kept = torch.empty_like(summary.mass)
    threshold = torch.empty(rows, dtype=torch.float32, device=device)
    given = (logits, temperature, filters.top_k, filters.top_p, summary.peak, summary.mass)
    sizes = dict(VOCAB=vocab, CHUNK=summary.chunk, BLOCK=summary.chunks_block)
    for level in range(_LEVELS.value):
        narrow_kernel[(rows, summary.chunks)](
            *given, low, above, above_mass, logits.stride(0), level,
            **sizes, IS_FIRST=level == 0, num_warps=4,
        )  # fmt: skip
    keep_kernel[(rows, summary.chunks)](
        *given, filters.min_p, low, above, above_mass, kept, threshold, logits.stride(0),
        **sizes, num_warps=8,
    )  # fmt: skip
    return kept, threshold


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


@triton.jit
def keep_kernel(
    logits: tl.tensor,  # as narrow_kernel's
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    peak: tl.tensor,
    mass: tl.tensor,
    min_p: tl.tensor,  # [N]
    low: tl.tensor,
    above: tl.tensor,
    above_mass: tl.tensor,
    kept: tl.tensor,  # [N, C] written
    threshold: tl.tensor,  # [N] written
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid: rows, chunks. The last bin is the threshold: the mass that reaches it."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    rate = inverse_temperature(temperature + n, True)
    highest, peaks = row_peak(peak + n * chunks, chunks, BLOCK)
    least = highest + tl.log2(tl.load(min_p + n)) / rate
    if _is_narrowed(n, temperature, top_k, top_p, VOCAB):
        total = tl.sum(row_mass(mass + n * chunks, peaks, highest, rate, chunks, BLOCK), 0)
        last: tl.constexpr = _LEVELS - 1
        key = _settle(n, last, low, above, above_mass, top_k, top_p, total, BLOCK, chunks)
        least = tl.maximum(least, _value(key))
    token = c * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + n * stride + token, mask=token < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    tl.store(kept + n * chunks + c, tl.sum(tl.where(x >= least, weigh(x, highest, rate), 0.0), 0))
    if c == 0:
        tl.store(threshold + n, least)


@triton.jit(do_not_specialize=["chunks"])
def draw_kernel(
    logits: tl.tensor,  # [N, V]
    temperature: tl.tensor,  # [N]
    seeds: tl.tensor,  # [N]
    positions: tl.tensor,  # [N]
    peak: tl.tensor,  # [N, C]
    peak_id: tl.tensor,  # [N, C]
    kept: tl.tensor,  # [N, C]
    threshold: tl.tensor,  # [N]
    tokens: tl.tensor,  # [N] written
    stride: tl.tensor,
    chunks: tl.tensor,  # C
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TEMPERED: tl.constexpr,
    FILTERED: tl.constexpr,
) -> None:
    """Grid: rows. Finds the chunk in which the drawn mass ends, then the token in the chunk."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    highest, peaks = row_peak(peak + n * chunks, chunks, BLOCK)
    holder = tl.min(tl.where((peaks == highest) & (c < chunks), c, chunks - 1), 0)
    likeliest = tl.load(peak_id + n * chunks + holder).to(tl.int64)
    tl.store(tokens + n, likeliest)
    if TEMPERED:
        if tl.load(temperature + n) > 0:
            rate = inverse_temperature(temperature + n, True)
            least = tl.full([], float("-inf"), tl.float32)
            if FILTERED:
                masses = tl.load(kept + n * chunks + c, mask=c < chunks, other=0.0)
                least = tl.load(threshold + n)
            else:
                masses = row_mass(kept + n * chunks, peaks, highest, rate, chunks, BLOCK)
            passed = tl.cumsum(masses, 0)
            share = _uniform(tl.load(seeds + n), tl.load(positions + n))
            target = share * tl.max(passed, 0)
            # rounding can put the target at the very end: then the last chunk that has mass
            end = tl.max(tl.where(masses > 0, c, 0), 0)
            chunk = tl.minimum(tl.sum((passed <= target).to(tl.int32), 0), end)
            before = tl.max(tl.where(c < chunk, passed, 0.0), 0)
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + n * stride + token, mask=token < VOCAB, other=float("-inf"))
            x = x.to(tl.float32)
            weight = tl.where(x >= least, weigh(x, highest, rate), 0.0)
            reached = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
            last = tl.max(tl.where(weight > 0, token, 0), 0)
            drawn = tl.min(tl.where(reached, token, last), 0)
            drawn = tl.where(tl.sum(reached.to(tl.int32), 0) > 0, drawn, last)
            if tl.max(passed, 0) > 0:  # else nothing is possible, or a logit is not a number
                tl.store(tokens + n, drawn.to(tl.int64))


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
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """In [0, 1), as `treadle.graphs.sampler.uniform`."""
    mixed = _mix(_mix(seed) + position * _GOLDEN)
    return ((mixed >> 40) & 0xFFFFFF).to(tl.float32) * (2.0**-24)


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = value + _GOLDEN
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)
