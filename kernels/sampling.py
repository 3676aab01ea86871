"""From logits to tokens, by noise per token; and what forbids tokens before.

Knows rows of logits only, never who holds the other parts of a vocabulary. A draw is
argmax((logit - peak) / temperature + g), the Gumbel-max trick (Maddison, Tarlow, Minka, A*
Sampling, 2014, section 2), with g = -log(-log1p(-v)) and v from a hash of (seed, position, token):
a row's token depends on nothing but its own logits, seed and length, and rarely on how the logits
were rounded.

Where each rank has some columns of the logits, `row_peaks`, the largest over the ranks,
`best_keys`, again the largest, and `ids_of` give every rank the tokens of `sample` on whole rows.

Axes: N rows that sample, V vocabulary or the columns of a part of it, B single bans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels import gpu, host

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit number
_MIX_1 = -0x40A7B892E31B1A47  # splitmix64's multipliers (Steele, Lea, Flood 2014), signed
_MIX_2 = -0x6B2FB644ECCEEE15
_PART = 1 << 20  # noise that torch makes at once, numbers: 8 MiB for each of a few temporaries
_LEAST = -(2**63)  # the key of no columns

_sample = host.function("treadle_sample", [*[host.POINTER] * 5, *[host.SIZE] * 3])
_row_peaks = host.function("treadle_row_peaks", [*[host.POINTER] * 2, *[host.SIZE] * 3])
_best_keys = host.function("treadle_best_keys", [*[host.POINTER] * 6, *[host.SIZE] * 4])
_ids_of = host.function("treadle_ids_of", [*[host.POINTER] * 2, host.SIZE])
_mask_logits = host.function("treadle_mask_logits", [*[host.POINTER] * 2, *[host.SIZE] * 4])
_ban = host.function("treadle_ban", [*[host.POINTER] * 3, *[host.SIZE] * 4])


def sample(
    logits: Tensor,  # [N, V] fp32, ids contiguous, any stride between rows
    temperature: Tensor | None,  # [N] fp32, 0 for a greedy row; None when every row is greedy
    seeds: Tensor,  # [N] int64
    positions: Tensor,  # [N] int64 length of the row, the new token excluded
    out: Tensor | None = None,  # [N] int64
) -> Tensor:
    """One token per row, out or new: the likeliest where temperature is 0, else a draw.

    Ties go to the lowest id. A logit that is not a number is never chosen. Where nothing is
    possible the token is 0.
    """
    if gpu.serves(logits):
        from treadle.kernels.gpu import sampling

        return sampling.sample(logits, temperature, seeds, positions, None, out)
    if _sample is None or not _is_fit(logits):
        return sample_torch(logits, temperature, seeds, positions, out)
    rows, vocab = logits.shape
    out = host.empty((rows,), torch.int64, logits.device) if out is None else out
    _check(rows, torch.int64, seeds, positions, out)
    _check(rows, torch.float32, temperature)
    _sample(
        logits.data_ptr(),
        None if temperature is None else temperature.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        out.data_ptr(),
        rows,
        vocab,
        logits.stride(0),
    )
    return out


def row_peaks(
    logits: Tensor,  # [N, V] fp32, as for sample; V may be 0
    out: Tensor | None = None,  # [N] fp32
) -> Tensor:
    """The part's largest logit of each row, out or new; -inf where no number is."""
    if gpu.serves(logits):
        from treadle.kernels.gpu import sampling

        return sampling.row_peaks(logits, out)
    if _row_peaks is None or not _is_fit(logits):
        return row_peaks_torch(logits, out)
    rows, columns = logits.shape
    out = host.empty((rows,), torch.float32, logits.device) if out is None else out
    _check(rows, torch.float32, out)
    _row_peaks(logits.data_ptr(), out.data_ptr(), rows, columns, logits.stride(0))
    return out


def best_keys(
    logits: Tensor,  # [N, V] fp32, as for sample; V may be 0
    temperature: Tensor | None,  # as for sample, the next two too
    seeds: Tensor,
    positions: Tensor,
    first_id: int,  # of the part's first column
    peaks: Tensor | None,  # [N] fp32 of the whole rows; None: every row is greedy, or all is here
    out: Tensor | None = None,  # [N] int64
) -> Tensor:
    """The part's best token of each row as one number, out or new: the largest of all parts wins.

    It grows with the score, and of equal scores the lower id has the larger. A part without columns
    has the least int64.
    """
    if gpu.serves(logits):
        from treadle.kernels.gpu import sampling

        return sampling.best_keys(logits, temperature, seeds, positions, first_id, peaks, out)
    if _best_keys is None or not _is_fit(logits):
        return best_keys_torch(logits, temperature, seeds, positions, first_id, peaks, out)
    rows, columns = logits.shape
    out = host.empty((rows,), torch.int64, logits.device) if out is None else out
    _check(rows, torch.int64, seeds, positions, out)
    _check(rows, torch.float32, temperature, peaks)
    _best_keys(
        logits.data_ptr(),
        None if temperature is None else temperature.data_ptr(),
        seeds.data_ptr(),
        positions.data_ptr(),
        None if peaks is None else peaks.data_ptr(),
        out.data_ptr(),
        first_id,
        rows,
        columns,
        logits.stride(0),
    )
    return out


def ids_of(
    keys: Tensor,  # [N] int64, the largest of all parts
    out: Tensor | None = None,  # [N] int64, may be keys
) -> Tensor:
    """The tokens of keys, out or new."""
    if _ids_of is None or not keys.is_cpu:
        return ids_of_torch(keys, out)
    out = host.empty_like(keys) if out is None else out
    _check(keys.shape[0], torch.int64, keys, out)
    _ids_of(keys.data_ptr(), out.data_ptr(), keys.shape[0])
    return out


def mask_logits(
    logits: Tensor,  # [N, V] fp32; written
    allowed: Tensor,  # [N, V] bool
) -> None:
    """Sets the logits of tokens that are not allowed to -inf."""
    if _mask_logits is None or not _is_fit(logits) or not _is_dense(allowed):
        return mask_logits_torch(logits, allowed)
    assert allowed.dtype is torch.bool and allowed.shape == logits.shape
    _mask_logits(
        logits.data_ptr(), allowed.data_ptr(), *logits.shape, logits.stride(0), allowed.stride(0)
    )
    return None


def ban(
    logits: Tensor,  # [N, V] fp32; written
    rows: Tensor,  # [B] int64; below 0: padding, bans nothing
    ids: Tensor,  # [B] int64; those that are not here ban nothing
    first_id: int = 0,  # of the first column
) -> None:
    """Sets the logits of single tokens to -inf."""
    if _ban is None or not _is_fit(logits):
        return ban_torch(logits, rows, ids, first_id)
    bans, columns = rows.shape[0], logits.shape[1]
    _check(bans, torch.int64, rows, ids)
    _ban(
        logits.data_ptr(),
        rows.data_ptr(),
        ids.data_ptr(),
        bans,
        first_id,
        columns,
        logits.stride(0),
    )
    return None


def _check(count: int, dtype: torch.dtype, *vectors: Tensor | None) -> None:
    for x in vectors:
        if x is not None:
            assert x.dtype is dtype and x.is_contiguous() and x.shape == (count,)


def _is_fit(logits: Tensor) -> bool:
    return logits.is_cpu and logits.dtype is torch.float32 and _is_dense(logits)


def _is_dense(x: Tensor) -> bool:
    return x.stride(1) == 1 or x.shape[1] <= 1


def sample_torch(
    logits: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    return ids_of_torch(best_keys_torch(logits, temperature, seeds, positions, 0, None), out)


def row_peaks_torch(logits: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if not logits.shape[1]:
        return out.fill_(-torch.inf)
    return torch.amax(_numbers(logits), dim=-1, out=out)


def best_keys_torch(
    logits: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    first_id: int,
    peaks: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    rows, columns = logits.shape
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not columns:
        return out.fill_(_LEAST)
    size = max(1, _PART // columns)
    ids = torch.arange(first_id, first_id + columns, device=logits.device)
    for begin in range(0, rows, size):
        part = slice(begin, begin + size)
        scores = _numbers(logits[part])
        if temperature is not None:
            t = temperature[part]
            peak = scores.amax(dim=-1) if peaks is None else peaks[part]
            drawn = (scores - peak.unsqueeze(1)) / torch.where(t > 0, t, 1.0).unsqueeze(1)
            drawn += gumbel(seeds[part], positions[part], ids)
            is_drawn = (t > 0) & peak.isfinite()
            scores = torch.where(is_drawn.unsqueeze(1), _numbers(drawn), scores)
        best, column = scores.max(dim=-1)
        bits = (best + 0.0).view(torch.int32).long()  # zeros of either sign are one
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        out[part] = (ordered << 32) | (0xFFFFFFFF - first_id - column)
    return out


def ids_of_torch(keys: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.bitwise_not(keys, out=out).bitwise_and_(0xFFFFFFFF)


def _numbers(x: Tensor) -> Tensor:
    """In fp32; what is not a number counts as -inf."""
    return x.float().masked_fill(x.isnan(), -torch.inf)


def mask_logits_torch(logits: Tensor, allowed: Tensor) -> None:
    logits.masked_fill_(~allowed, -torch.inf)


def ban_torch(logits: Tensor, rows: Tensor, ids: Tensor, first_id: int = 0) -> None:
    if not logits.shape[1]:
        return
    columns = ids - first_id
    is_here = (rows >= 0) & (columns >= 0) & (columns < logits.shape[1])
    # adding lets what bans nothing and a real ban meet at one place
    change = torch.where(is_here, -torch.inf, 0.0)
    place = rows.clamp_min(0), columns.clamp(0, logits.shape[1] - 1)
    logits.index_put_(place, change, accumulate=True)


def gumbel(
    seeds: Tensor,  # [N] int64
    positions: Tensor,  # [N] int64
    ids: Tensor,  # [V] int64
) -> Tensor:  # [N, V] fp32
    """The noise of every row's tokens: independent draws of the standard Gumbel distribution."""
    rows = _mix(_mix(seeds) + positions * _GOLDEN)
    mixed = _mix(rows.unsqueeze(1) + ids * _GOLDEN)
    halves = ((mixed >> 33) & 0x7FFFFFFF).float() + 0.5
    return -(-torch.log1p(-(halves * 2.0**-31).clamp_max(1 - 2.0**-24))).log()


def _mix(value: Tensor) -> Tensor:
    value = value + _GOLDEN
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)
