"""From logits to tokens without a host sync and without sorting.

Knows rows of logits only. A token is kept when its logit reaches the row's threshold; whether a
threshold keeps too many is monotone, so 8 passes find it bit by bit, 4 bits each, exactly.
A draw is the largest of the kept tokens' logits plus noise keyed by (seed, position, token), as
`treadle.kernels.sampling` makes it, so a row never depends on its neighbours.

Axes: N rows, V vocabulary, C chunks of a row, B bins of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
_LEAST = -(2**63)  # the key of no columns


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
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if rows:
        best = summary = summarize(logits, temperature)
        if temperature is not None:
            threshold = None
            if filters is not None:
                threshold = _narrow(logits, temperature, filters, summary)
            best = _draw(logits, temperature, seeds, positions, summary, threshold=threshold)
        _pick(best, 0, tokens, is_key=False)
    return tokens


def row_peaks(
    logits: Tensor,  # [N, V] ids contiguous
    out: Tensor | None = None,  # [N] fp32
) -> Tensor:  # [N] fp32
    """As `treadle.kernels.sampling.row_peaks`."""
    rows, columns = logits.shape
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device) if out is None else out
    if not rows or not columns:
        return peaks.fill_(-torch.inf)
    chunks = summarize(logits, None).peak
    # a chunk without a number has none for its peak
    return torch.amax(chunks.masked_fill(chunks.isnan(), -torch.inf), dim=1, out=peaks)


def best_keys(
    logits: Tensor,  # [N, V] ids contiguous
    temperature: Tensor | None,  # as for sample, the next two too
    seeds: Tensor,
    positions: Tensor,
    first_id: int,
    peaks: Tensor | None,  # [N] fp32 of the whole rows; None: the part's own
    out: Tensor | None = None,  # [N] int64
) -> Tensor:  # [N] int64
    """As `treadle.kernels.sampling.best_keys`.

    Takes no filters: they need thresholds of whole rows.
    """
    rows, columns = logits.shape
    keys = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if not rows or not columns:
        return keys.fill_(_LEAST)
    best = summary = summarize(logits, temperature)
    if temperature is not None:
        best = _draw(logits, temperature, seeds, positions, summary, first_id, peaks)
    _pick(best, first_id, keys, is_key=True)
    return keys


def _draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    summary: Summary,
    first_id: int = 0,
    peaks: Tensor | None = None,
    threshold: Tensor | None = None,  # [N] fp32
) -> Summary:  # the largest score of every chunk and its column in place of the peaks
    best, best_id = torch.empty_like(summary.peak), torch.empty_like(summary.peak_id)
    draw_kernel[(logits.shape[0], summary.chunks)](
        logits, temperature, best if threshold is None else threshold, seeds, positions,
        best if peaks is None else peaks, summary.peak, summary.peak_id, best, best_id,
        logits.stride(0), first_id, VOCAB=logits.shape[1], CHUNK=summary.chunk,
        BLOCK=summary.chunks_block, FILTERED=threshold is not None, PART=peaks is not None,
        num_warps=8,
    )  # fmt: skip
    return replace(summary, peak=best, peak_id=best_id)


def _pick(best: Summary, first_id: int, out: Tensor, is_key: bool) -> None:
    pick_kernel[(out.shape[0],)](
        best.peak, best.peak_id, out, best.chunks, first_id, BLOCK=best.chunks_block,
        IS_KEY=is_key, num_warps=1,
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["first_id"])
def draw_kernel(
    logits: tl.tensor,  # [N, V]
    temperature: tl.tensor,  # [N]
    threshold: tl.tensor,  # [N] read when FILTERED
    seeds: tl.tensor,  # [N]
    positions: tl.tensor,  # [N]
    peaks: tl.tensor,  # [N] read when PART
    peak: tl.tensor,  # [N, C]
    peak_id: tl.tensor,  # [N, C]
    best: tl.tensor,  # [N, C] written: the largest score of every chunk, and its column
    best_id: tl.tensor,  # [N, C] written
    stride: tl.tensor,
    first_id: tl.tensor,  # of the first column
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    PART: tl.constexpr,  # other columns are elsewhere
) -> None:
    """Grid: rows, chunks. A greedy row's scores are its logits."""
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    at = n * chunks + c
    if PART:
        highest = tl.load(peaks + n)
    else:
        highest, _ = row_peak(peak + n * chunks, chunks, BLOCK)
    t = tl.load(temperature + n)
    # a peak that is not finite leaves no differences to draw by
    if (t > 0) & (tl.abs(highest) < float("inf")):
        token = c * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + n * stride + token, mask=token < VOCAB, other=float("-inf"))
        x = x.to(tl.float32)
        row = _mix(_mix(tl.load(seeds + n)) + tl.load(positions + n) * _GOLDEN)
        score = tl.div_rn(x - highest, t) + _gumbel(row, first_id + token)
        least = tl.load(threshold + n) if FILTERED else float("-inf")
        score = tl.where(x >= least, score, float("-inf"))  # a NaN is not kept either
        largest = tl.max(score, 0)
        first = tl.min(tl.where((score == largest) & (token < VOCAB), token, VOCAB - 1), 0)
        tl.store(best + at, largest)
        tl.store(best_id + at, first)
    else:
        tl.store(best + at, tl.load(peak + at))
        tl.store(best_id + at, tl.load(peak_id + at))


@triton.jit(do_not_specialize=["chunks", "first_id"])
def pick_kernel(
    best: tl.tensor,  # [N, C]
    best_id: tl.tensor,  # [N, C]
    picked: tl.tensor,  # [N] written: keys or ids
    chunks: tl.tensor,  # C
    first_id: tl.tensor,  # of the first column
    BLOCK: tl.constexpr,
    IS_KEY: tl.constexpr,
) -> None:
    """Grid: rows. The largest of the chunks' keys, or its token."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    values = tl.load(best + n * chunks + c, mask=c < chunks, other=float("-inf"))
    column = tl.load(best_id + n * chunks + c, mask=c < chunks, other=0)
    # where nothing is possible the first one is, however the columns are parted
    is_possible = values > float("-inf")
    score = _key(tl.where(is_possible, values, float("-inf"))).to(tl.int64)
    token = first_id + tl.where(is_possible, column, 0).to(tl.int64)
    key = tl.max((score << 32) | (0xFFFFFFFF - token), 0)
    tl.store(picked + n, key if IS_KEY else 0xFFFFFFFF - (key & 0xFFFFFFFF))


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
