"""From logits to tokens, by noise per token; and what forbids tokens before.

Knows rows of logits only. A draw is argmax((logit - peak) / temperature + g), the Gumbel-max trick
(Maddison, Tarlow, Minka, A* Sampling, 2014, section 2), with g = -log(-log1p(-v)) and v from a
hash of (seed, position, token): a row's token depends on nothing but its own logits, seed and
length, and rarely on how the logits were rounded.

Axes: N rows that sample, V vocabulary, B single bans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels import gpu, host

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit number
_MIX_1 = -0x40A7B892E31B1A47  # splitmix64's multipliers (Steele, Lea, Flood 2014), signed
_MIX_2 = -0x6B2FB644ECCEEE15
_PART = 1 << 20  # noise that torch makes at once, numbers: 8 MiB for each of a few temporaries

_sample = host.function("treadle_sample", [*[host.POINTER] * 5, *[host.SIZE] * 3])
_mask_logits = host.function("treadle_mask_logits", [*[host.POINTER] * 2, *[host.SIZE] * 4])
_ban = host.function("treadle_ban", [*[host.POINTER] * 3, *[host.SIZE] * 2])


def sample(
    logits: Tensor,  # [N, V] fp32, ids contiguous, any stride between rows
    temperature: Tensor | None,  # [N] fp32, 0 for a greedy row; None when every row is greedy
    seeds: Tensor,  # [N] int64
    positions: Tensor,  # [N] int64 length of the row, the new token excluded
    out: Tensor | None = None,  # [N] int64
) -> Tensor:
    """One token per row, out or new: the likeliest where temperature is 0, else a draw.

    Ties go to the lowest id. Where nothing is possible the token is 0, where logits are not
    numbers it is any.
    """
    if gpu.serves(logits):
        from treadle.kernels.gpu import sampling

        return sampling.sample(logits, temperature, seeds, positions, None, out)
    if _sample is None or not _is_fit(logits):
        return sample_torch(logits, temperature, seeds, positions, out)
    rows, vocab = logits.shape
    out = host.empty((rows,), torch.int64, logits.device) if out is None else out
    for given in (seeds, positions, out):
        assert given.dtype is torch.int64 and given.is_contiguous() and given.shape == (rows,)
    if temperature is not None:
        assert temperature.dtype is torch.float32 and temperature.is_contiguous()
        assert temperature.shape == (rows,)
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
    ids: Tensor,  # [B] int64
) -> None:
    """Sets the logits of single tokens to -inf."""
    if _ban is None or not _is_fit(logits):
        return ban_torch(logits, rows, ids)
    for given in (rows, ids):
        assert given.dtype is torch.int64 and given.is_contiguous() and given.shape == rows.shape
    _ban(logits.data_ptr(), rows.data_ptr(), ids.data_ptr(), rows.shape[0], logits.stride(0))
    return None


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
    tokens = logits.argmax(dim=-1)
    if temperature is not None:
        size = max(1, _PART // logits.shape[1])
        ids = torch.arange(logits.shape[1], device=logits.device)
        for begin in range(0, logits.shape[0], size):
            part = slice(begin, begin + size)
            t = temperature[part]
            peak = logits[part].amax(dim=-1)
            scores = (logits[part] - peak.unsqueeze(1)) / torch.where(t > 0, t, 1.0).unsqueeze(1)
            scores += gumbel(seeds[part], positions[part], ids)
            is_drawn = (t > 0) & peak.isfinite()
            tokens[part] = torch.where(is_drawn, scores.argmax(dim=-1), tokens[part])
    return tokens if out is None else out.copy_(tokens)


def mask_logits_torch(logits: Tensor, allowed: Tensor) -> None:
    logits.masked_fill_(~allowed, -torch.inf)


def ban_torch(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    # adding lets padding and a real ban meet at one place
    change = torch.where(rows < 0, 0.0, -torch.inf)
    logits.index_put_((rows.clamp_min(0), ids), change, accumulate=True)


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
