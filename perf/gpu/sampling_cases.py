"""Cases of the kernels over logits: sampling, masks, penalties, log-probabilities.

Knows rows of logits. Axes: N rows, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from treadle.kernels import reference_sampling as reference
from treadle.perf.gpu.kernel_cases import Case, Timed, error_of
from treadle.perf.gpu.sections import Setting

_VOCAB = 1601  # of small inputs: several parts, none of them full
_LOG = 1e-5  # fp32 rounds noise and sums to 1e-6 or two, a device's logarithm the same
_NONE = float("inf")


def sampling_cases(setting: Setting) -> list[Case]:
    device = setting.device
    size = (2, 300) if setting.is_tiny else (256, 128_256)
    sampled = [
        Case(
            f"sample {name}",
            partial(_sample_error, device, name),
            partial(_sample, device, name, size),
        )
        for name in ("greedy", "drawn", "filtered")
    ]
    return [
        *sampled,
        Case("apply_bitmask", partial(_bitmask_error, device), partial(_bitmask, device, size)),
        Case("penalize", partial(_penalize_error, device), partial(_penalize, device, size)),
        Case("logprobs", partial(_logprobs_error, device), partial(_logprobs, device, size)),
    ]


def _inputs(device: str, name: str, rows: int, vocab: int) -> list[Tensor | None]:
    """Logits, temperature, seeds, positions; with filters three more."""
    logits = torch.randn(rows, vocab, device=device) * 2
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device=device)
    positions = torch.randint(0, 2**20, (rows,), device=device)
    if name == "greedy":
        return [logits, None, seeds, positions]
    warm = torch.rand(rows, device=device) + 0.3
    if name == "drawn":
        return [logits, warm, seeds, positions]
    top_k = torch.randint(1, 60, (rows,), device=device).int()
    top_p = torch.rand(rows, device=device) * 0.9 + 0.1
    return [logits, warm, seeds, positions, top_k, top_p, torch.rand(rows, device=device) * 0.1]


def _draw(inputs: list[Tensor | None]) -> Tensor:
    from treadle.kernels.gpu import sampling

    logits, warm, seeds, positions, *limits = inputs
    filters = None
    if limits:
        top_k, top_p, min_p = limits
        assert top_k is not None and top_p is not None and min_p is not None
        filters = sampling.Filters(top_k, top_p, min_p)
    assert logits is not None and seeds is not None and positions is not None
    return sampling.sample(logits, warm, seeds, positions, filters)


def _sample_error(device: str, name: str) -> float:
    inputs = _inputs(device, name, 4, _VOCAB)
    tokens = _draw(inputs).tolist()
    logits, warm, seeds, positions, *limits = (None if x is None else x.cpu() for x in inputs)
    assert logits is not None and seeds is not None and positions is not None
    if warm is None:
        return 0.0 if tokens == logits.argmax(-1).tolist() else _NONE
    worst = 0.0
    for n, token in enumerate(tokens):
        noise = reference.gumbel(int(seeds[n]), int(positions[n]), _VOCAB)
        top_k, top_p, min_p = (x[n] for x in limits if x is not None) if limits else (2**30, 1, 0)
        scores = reference.scores(
            logits[n], float(warm[n]), int(top_k), float(top_p), float(min_p), noise
        )
        worst = max(worst, float(scores.max() - scores[token]) / _LOG)
    return worst


def _sample(device: str, name: str, size: tuple[int, int]) -> Timed:
    inputs = _inputs(device, name, *size)
    logits = inputs[0]
    assert logits is not None
    rival = partial(logits.argmax, -1) if name == "greedy" else None
    return Timed(partial(_draw, inputs), float(logits.nbytes), 0.0, rival, 1e-9)


def _bits(device: str, rows: int, vocab: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device=device).int()


def _bitmask_error(device: str) -> float:
    from treadle.kernels.gpu.bitmask import apply_bitmask

    logits, bits = torch.randn(3, _VOCAB, device=device), _bits(device, 3, _VOCAB)
    want = reference.apply_bitmask(logits.cpu(), bits.cpu())
    apply_bitmask(logits, bits)
    return 0.0 if torch.equal(logits.cpu().double(), want) else _NONE


def _bitmask(device: str, size: tuple[int, int]) -> Timed:
    from treadle.kernels.gpu.bitmask import apply_bitmask

    logits, bits = torch.randn(size, device=device), _bits(device, *size)

    def call() -> Tensor:
        apply_bitmask(logits, bits)
        return logits

    return Timed(call, bits.nbytes + logits.nbytes / 2)  # half of the tokens are written


def _penalties(device: str, rows: int, vocab: int) -> tuple[Tensor, ...]:
    """The pool's rows, counts, bits of the prompts, and three strengths."""
    counts = torch.randint(-3, 4, (rows, vocab), device=device).clamp_min(0).int()
    strengths = (torch.randn(rows, device=device) for _ in range(2))
    repetition = torch.rand(rows, device=device) * 1.9 + 0.1
    order = torch.randperm(rows, device=device)
    return order, counts, _bits(device, rows, vocab), *strengths, repetition


def _penalize_error(device: str) -> float:
    from treadle.kernels.gpu.penalties import penalize

    logits = torch.randn(4, _VOCAB, device=device) * 4
    order, counts, bits, *strengths = _penalties(device, 4, _VOCAB)
    words = bits.cpu().long().unsqueeze(-1) >> torch.arange(32)
    in_prompt = (words & 1).flatten(1)[:, :_VOCAB].bool()
    pool = order.cpu()
    want = reference.penalize(
        logits.cpu(), counts.cpu()[pool], in_prompt[pool], *(x.cpu() for x in strengths)
    )
    penalize(logits, order, counts, bits, *strengths)
    return error_of(logits, want, 1e-5)


def _penalize(device: str, size: tuple[int, int]) -> Timed:
    from treadle.kernels.gpu.penalties import penalize

    logits = torch.randn(size, device=device)
    order, counts, bits, *strengths = _penalties(device, *size)

    def call() -> Tensor:
        penalize(logits, order, counts, bits, *strengths)
        return logits

    return Timed(call, 2.0 * logits.nbytes + counts.nbytes + bits.nbytes)


def _logprobs_error(device: str) -> float:
    from treadle.kernels.gpu.logprobs import logprobs

    logits = torch.randn(4, _VOCAB, device=device) * 5 + 100
    tokens = torch.randint(0, _VOCAB, (4, 5), device=device)
    return error_of(
        logprobs(logits, tokens), reference.logprobs(logits.cpu(), tokens.cpu()), 3e-5
    )  # fmt: skip


def _logprobs(device: str, size: tuple[int, int]) -> Timed:
    from treadle.kernels.gpu.logprobs import logprobs

    logits = torch.randn(size, device=device)
    tokens = torch.randint(0, size[1], (size[0], 5), device=device)

    def rival() -> Tensor:
        return logits.log_softmax(-1).gather(1, tokens)

    return Timed(partial(logprobs, logits, tokens), float(logits.nbytes), 0.0, rival, 3e-5)
