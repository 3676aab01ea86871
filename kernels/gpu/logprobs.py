"""Log-probabilities of some tokens without those of all.

Knows rows of logits only.

Axes: N rows, V vocabulary, M tokens asked for in a row, C chunks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.kernels.gpu.summary import inverse_temperature, row_mass, row_peak, summarize

_LN2 = tl.constexpr(0.6931471805599453)


def logprobs(
    logits: Tensor,  # [N, V] ids contiguous
    tokens: Tensor,  # [N, M] int64
) -> Tensor:  # [N, M] fp32
    """log softmax(logits) at the given tokens."""
    summary = summarize(logits, None)
    tokens = tokens.contiguous()
    out = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    rows, asked = tokens.shape
    if out.numel():
        logprobs_kernel[(rows,)](
            logits, tokens, summary.peak, summary.mass, out, logits.stride(0), asked,
            summary.chunks, BLOCK=summary.chunks_block, ASKED=triton.next_power_of_2(asked),
            num_warps=1,
        )  # fmt: skip
    return out


def top_logprobs(
    logits: Tensor,  # [N, V] ids contiguous
    k: int,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens, likeliest first: log-probabilities [N, k] fp32, ids [N, k] int64."""
    ids = logits.topk(k, dim=-1).indices
    return logprobs(logits, ids), ids


@triton.jit(do_not_specialize=["asked", "chunks"])
def logprobs_kernel(
    logits: tl.tensor,  # [N, V]
    tokens: tl.tensor,  # [N, M]
    peak: tl.tensor,  # [N, C]
    mass: tl.tensor,  # [N, C]
    out: tl.tensor,  # [N, M] written
    stride: tl.tensor,
    asked: tl.tensor,  # M
    chunks: tl.tensor,  # C
    BLOCK: tl.constexpr,
    ASKED: tl.constexpr,
) -> None:
    n = tl.program_id(0).to(tl.int64)
    highest, peaks = row_peak(peak + n * chunks, chunks, BLOCK)
    rate = inverse_temperature(peak, False)
    total = tl.sum(row_mass(mass + n * chunks, peaks, highest, rate, chunks, BLOCK), 0)
    m = tl.arange(0, ASKED)
    token = tl.load(tokens + n * asked + m, mask=m < asked, other=0)
    x = tl.load(logits + n * stride + token, mask=m < asked, other=0.0).to(tl.float32)
    tl.store(out + n * asked + m, x - highest - tl.log2(total) * _LN2, mask=m < asked)
