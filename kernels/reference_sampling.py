"""The plain meaning of sampling, of what changes logits before it, and of attention's extras.

Knows nothing of speed, and shares no code with the kernels. All results are fp64.

Axes: N rows, V vocabulary, T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [slots, K, D]
    v_cache: Tensor,  # [slots, K, D]
    q_lens: list[int],
    seq_lens: list[int],
    page_table: Tensor,  # [rows, pages]
    page_size: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,  # [H]
    softcap: float | None = None,
) -> Tensor:
    """One query at a time; a sink is a key of its own whose value is zero."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[1]
    token = 0
    for row, (q_len, seq_len) in enumerate(zip(q_lens, seq_lens, strict=True)):
        for position in range(seq_len - q_len, seq_len):
            first = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(first, position + 1)
            slots = page_table[row, seen // page_size].long() * page_size + seen % page_size
            keys = k_cache[slots].double().repeat_interleave(group, dim=1)  # [seen, H, D]
            values = v_cache[slots].double().repeat_interleave(group, dim=1)
            scores = (keys * q[token].double()).sum(-1) * scale  # [seen, H]
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().unsqueeze(0)])
            weights = scores.softmax(0)[: len(seen)]
            out[token] = (weights.unsqueeze(-1) * values).sum(0)
            token += 1
    return out


def penalize(
    logits: Tensor,  # [N, V]
    counts: Tensor,  # [N, V] how often each token was generated
    in_prompt: Tensor,  # [N, V] bool
    presence: Tensor,  # [N]
    frequency: Tensor,  # [N]
    repetition: Tensor,  # [N] 1 means none
) -> Tensor:
    """Presence and frequency look at what was generated, repetition at the prompt too."""
    out = logits.double().clone()
    for n in range(out.shape[0]):
        for token in range(out.shape[1]):
            count, value = int(counts[n, token]), float(out[n, token])
            value -= float(frequency[n]) * count + float(presence[n]) * (count > 0)
            if count > 0 or in_prompt[n, token]:
                value = value / float(repetition[n]) if value > 0 else value * float(repetition[n])
            out[n, token] = value
    return out


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Bit i of word w allows token 32 w + i."""
    out = logits.double().clone()
    for n in range(out.shape[0]):
        for token in range(out.shape[1]):
            if not (int(bitmask[n, token // 32]) >> (token % 32)) & 1:
                out[n, token] = -math.inf
    return out


def kept(
    logits: Tensor,  # [V]
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:  # [V] bool
    """Tokens that may be drawn. Each limit looks at the whole tempered distribution.

    Kept are tokens with fewer than top_k likelier ones, whose likelier ones together have less
    than top_p (the likeliest always), and that have at least min_p of the likeliest's probability.
    Equally likely tokens share their fate.
    """
    probabilities = (logits.double() / temperature).softmax(0)
    keep = torch.zeros(len(logits), dtype=torch.bool)
    for token, p in enumerate(probabilities):
        likelier = probabilities[logits > logits[token]]
        keep[token] = (
            len(likelier) < top_k
            and (len(likelier) == 0 or top_p >= 1 or bool(likelier.sum() < top_p))
            and bool(p >= min_p * probabilities.max())
        )
    return keep


def uniform(seed: int, position: int, vocab: int) -> list[float]:
    """Numbers strictly between 0 and 1 of a row's tokens: 31 bits of their hashes, and a half."""
    row = _splitmix64(_splitmix64(seed) + position * _GOLDEN)
    hashes = [_splitmix64(row + token * _GOLDEN) for token in range(vocab)]
    return [((x >> 33) + 0.5) / 2**31 for x in hashes]


def gumbel(seed: int, position: int, vocab: int) -> Tensor:
    """Noise [V] of a row's tokens: the inverse distribution function at 1 - uniform."""
    noise = [-math.log(-math.log1p(-v)) for v in uniform(seed, position, vocab)]
    return torch.tensor(noise, dtype=torch.float64)


def _splitmix64(x: int) -> int:
    """The generator's first output from this state (Steele, Lea, Flood 2014)."""
    x = (x + _GOLDEN) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def scores(
    logits: Tensor,  # [V]
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    noise: Tensor,  # [V]
) -> Tensor:  # [V]
    """What a draw takes the largest of: the kept tokens' tempered log-probabilities with noise."""
    keep = kept(logits, temperature, top_k, top_p, min_p)
    noisy = (logits.double() / temperature).log_softmax(0) + noise
    return torch.where(keep, noisy, -math.inf)


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """[N, M]: the log-probability of each of tokens [N, M] in its row."""
    out = torch.empty(tokens.shape, dtype=torch.float64)
    for n, row in enumerate(logits.double()):
        largest = float(row.max())
        normalizer = largest + math.log(sum(math.exp(x - largest) for x in row.tolist()))
        for m, token in enumerate(tokens[n].tolist()):
            out[n, m] = float(row[token]) - normalizer
    return out
