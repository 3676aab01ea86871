"""Penalties for tokens that have been seen, and the counts that they need.

Knows rows of logits and a pool of count rows; never which request owns one.

Axes: N rows, V vocabulary, W = ceil(V / 32) words, L rows of the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def penalize(
    logits: Tensor,  # [N, V] fp32, ids contiguous; written
    pool_rows: Tensor,  # [N] int64 row of the pool, -1 for a row without penalties
    counts: Tensor,  # [L, V] int32 how often each token was generated
    prompt_bits: Tensor,  # [L, W] int32: bit i of word w says that the prompt has token 32 w + i
    presence: Tensor,  # [N] fp32
    frequency: Tensor,  # [N] fp32
    repetition: Tensor,  # [N] fp32, 1 for none
) -> None:
    """As `treadle.kernels.reference_sampling.penalize`, in place."""
    assert logits.stride(1) == 1 and counts.is_contiguous() and prompt_bits.is_contiguous()
    rows, vocab = logits.shape
    if rows:
        penalize_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
            logits, pool_rows, counts, prompt_bits, presence, frequency, repetition,
            logits.stride(0), VOCAB=vocab, WORDS=prompt_bits.shape[1], BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


def count_tokens(
    counts: Tensor,  # [L, V] int32, written
    pool_rows: Tensor,  # [N] int64, -1: not counted
    tokens: Tensor,  # [N] int64
) -> None:
    """Adds one to each token of each row; a row may stand in the list more than once."""
    assert counts.is_contiguous()
    if len(tokens):
        count_kernel[(len(tokens),)](counts, pool_rows, tokens, VOCAB=counts.shape[1], num_warps=1)


@triton.jit
def penalize_kernel(
    logits: tl.tensor,  # [N, V]
    pool_rows: tl.tensor,  # [N]
    counts: tl.tensor,  # [L, V]
    prompt_bits: tl.tensor,  # [L, W]
    presence: tl.tensor,  # [N]
    frequency: tl.tensor,  # [N]
    repetition: tl.tensor,  # [N]
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    n = tl.program_id(0).to(tl.int64)
    pool_row = tl.load(pool_rows + n).to(tl.int64)
    if pool_row < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    count = tl.load(counts + pool_row * VOCAB + token, mask=inside, other=0)
    word = tl.load(prompt_bits + pool_row * WORDS + token // 32, mask=inside, other=0)
    x = tl.load(logits + n * stride + token, mask=inside, other=0.0)
    x -= tl.load(frequency + n) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence + n), 0.0)
    factor = tl.load(repetition + n)
    is_seen = (count > 0) | (((word >> (token % 32)) & 1) == 1)
    x = tl.where(is_seen, tl.where(x > 0, x / factor, x * factor), x)
    tl.store(logits + n * stride + token, x, mask=inside)


@triton.jit
def count_kernel(
    counts: tl.tensor,  # [L, V]
    pool_rows: tl.tensor,  # [N]
    tokens: tl.tensor,  # [N]
    VOCAB: tl.constexpr,
) -> None:
    n = tl.program_id(0)
    pool_row = tl.load(pool_rows + n).to(tl.int64)
    if pool_row >= 0:
        tl.atomic_add(counts + pool_row * VOCAB + tl.load(tokens + n), 1)
