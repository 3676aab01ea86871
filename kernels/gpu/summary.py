"""One pass over logits that sampling and logprobs share: the peak and the mass of every chunk.

Knows nothing of tokens' meaning. Chunks let one row use many processors without atomics, so a
result never depends on the order in which programs run.

Axes: N rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from treadle.kernels.gpu.attention_core import LOG2E

_MAX_CHUNK = 4096  # logits


@dataclass(frozen=True, slots=True)
class Summary:
    """Per chunk: the largest logit, its first id, and sum of exp((logit - peak) / temperature)."""

    peak: Tensor  # [N, C] fp32
    peak_id: Tensor  # [N, C] int32
    mass: Tensor  # [N, C] fp32
    chunk: int  # logits of a chunk, a power of two

    @property
    def chunks(self) -> int:
        return self.peak.shape[1]

    @property
    def chunks_block(self) -> int:
        return int(triton.next_power_of_2(self.chunks))


def summarize(
    logits: Tensor,  # [N, V] ids contiguous
    temperature: Tensor | None,  # [N] fp32; None or 0 mean 1
) -> Summary:
    """The chunks' summaries, on the device."""
    assert logits.stride(1) == 1
    rows, vocab = logits.shape
    chunk = min(_MAX_CHUNK, max(16, triton.next_power_of_2(vocab)))
    chunks = triton.cdiv(vocab, chunk)
    peak = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    peak_id = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    mass = torch.empty_like(peak)
    if rows:
        summary_kernel[(rows, chunks)](
            logits, peak if temperature is None else temperature, peak, peak_id, mass,
            logits.stride(0), VOCAB=vocab, CHUNK=chunk, TEMPERED=temperature is not None,
            num_warps=8,
        )  # fmt: skip
    return Summary(peak, peak_id, mass, chunk)


@triton.jit
def summary_kernel(
    logits: tl.tensor,  # [N, V]
    temperature: tl.tensor,  # [N]
    peak: tl.tensor,  # [N, C] written, as the next two
    peak_id: tl.tensor,
    mass: tl.tensor,
    stride: tl.tensor,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    TEMPERED: tl.constexpr,
) -> None:
    n, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = c * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + n * stride + token, mask=token < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    largest = tl.max(x, 0)
    first = tl.min(tl.where((x == largest) & (token < VOCAB), token, VOCAB - 1), 0)
    at = n * tl.num_programs(1) + c
    tl.store(peak + at, largest)
    tl.store(peak_id + at, first)
    rate = inverse_temperature(temperature + n, TEMPERED)
    tl.store(mass + at, tl.sum(weigh(x, largest, rate), 0))


@triton.jit
def inverse_temperature(
    temperature: tl.tensor,
    TEMPERED: tl.constexpr,
) -> tl.tensor:
    """1 / temperature in base 2; a greedy row counts as 1."""
    if TEMPERED:
        t = tl.load(temperature)
        return LOG2E / tl.where(t > 0, t, 1.0)
    return tl.full([], LOG2E, tl.float32)


@triton.jit
def weigh(
    x: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,  # base 2
) -> tl.tensor:  # exp((x - peak) / temperature), 0 for an impossible token
    return tl.where(x == float("-inf"), 0.0, tl.exp2((x - peak) * rate))


@triton.jit
def row_peak(
    peak: tl.tensor,  # [C] of the row
    chunks: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # scalar, and the chunks' own peaks [BLOCK]
    c = tl.arange(0, BLOCK)
    peaks = tl.load(peak + c, mask=c < chunks, other=float("-inf"))
    return tl.max(peaks, 0), peaks


@triton.jit
def row_mass(
    mass: tl.tensor,  # [C] of the row
    peaks: tl.tensor,  # [BLOCK]
    highest: tl.tensor,
    rate: tl.tensor,
    chunks: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # [BLOCK] the chunks' masses relative to the row's peak
    c = tl.arange(0, BLOCK)
    return tl.load(mass + c, mask=c < chunks, other=0.0) * weigh(peaks, highest, rate)
