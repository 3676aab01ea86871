"""Forbidding tokens by packed bits.

Knows nothing of grammars: bits are as xgrammar lays them out.

Axes: N rows, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def apply_bitmask(
    logits: Tensor,  # [N, V] ids contiguous; written
    bitmask: Tensor,  # [N, W] int32: bit i of word w allows token 32 w + i
) -> None:
    """Sets the logits of forbidden tokens to -inf."""
    assert logits.stride(1) == 1 and bitmask.stride(1) == 1
    rows, vocab = logits.shape
    if rows:
        bitmask_kernel[(rows, triton.cdiv(vocab, _BLOCK))](
            logits, bitmask, logits.stride(0), bitmask.stride(0),
            VOCAB=vocab, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def bitmask_kernel(
    logits: tl.tensor,
    bitmask: tl.tensor,
    logits_n: tl.tensor,  # strides
    bitmask_n: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    n = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + n * bitmask_n + token // 32, mask=token < VOCAB, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + n * logits_n + token, float("-inf"), mask=forbidden & (token < VOCAB))
