"""Ranks as threads of this process, their group a barrier; and one decode step on a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from treadle.graphs.models.decoder import Activations, Decoder
from treadle.graphs.parallel import TensorParallel
from treadle.kernels import host, tape
from treadle.kernels.paged_attention import AttentionMeta

T = TypeVar("T")
TIMEOUT_S = 120


class _Done:
    def wait(self) -> None:
        """Nothing is left to wait for."""


class Meeting:
    """Where threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.brought: list[Tensor] = [torch.empty(0)] * size
        self.num_reduced = [0] * size  # collectives, by rank


class ThreadGroup:
    """One rank's view of a meeting: it reduces in the order of the ranks, the same on each."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def size(self) -> int:
        return self._meeting.size

    def allreduce(self, tensors: list[Tensor], op: ReduceOp, /) -> _Done:
        combine = torch.add if op == ReduceOp(ReduceOp.SUM) else torch.maximum
        for x in tensors:
            assert x.is_contiguous()
            self._meeting.brought[self._rank] = x.clone()
            self._meeting.barrier.wait()
            first, *others = self._meeting.brought
            for other in others:
                first = combine(first, other)
            self._meeting.barrier.wait()
            x.copy_(first)
        self._meeting.num_reduced[self._rank] += 1
        return _Done()


def rank_threads(size: int) -> tuple[Meeting, list[TensorParallel]]:
    meeting = Meeting(size)
    return meeting, [TensorParallel(rank, size, ThreadGroup(meeting, rank)) for rank in range(size)]


def together(meeting: Meeting, bodies: Sequence[Callable[[], T]]) -> list[T]:
    """What the bodies give, each run in a rank's thread."""

    def run(body: Callable[[], T]) -> T:
        try:
            with torch.inference_mode():
                return body()
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(meeting.size) as pool:
        futures = [pool.submit(run, body) for body in bodies]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


@torch.inference_mode()
def decode_logits(decoder: Decoder, token_ids: Sequence[int], *, recorded: bool) -> Tensor:
    """The rank's logits of rows of one token each at position 0, [R, V], straight or from a tape.

    recorded: also that recording alone computes nothing.
    """
    rows, spec = len(token_ids), decoder.spec
    activations = Activations.empty(spec, rows, decoder.embedding)
    activations.token_ids.copy_(torch.tensor(token_ids))
    activations.slot_mapping.copy_(torch.arange(rows))
    shape = (rows, spec.num_kv_heads, spec.head_dim)
    caches = [
        (
            torch.full(shape, torch.nan, dtype=decoder.dtype),
            torch.full(shape, torch.nan, dtype=decoder.dtype),
        )
        for _ in decoder.layers
    ]
    meta = AttentionMeta(
        torch.arange(rows + 1).int(), torch.ones(rows).int(), torch.arange(rows),
        torch.arange(rows).int()[:, None], page_size=1, max_q_len=1, max_seq_len=1,
    )  # fmt: skip
    logits = torch.full((rows, spec.vocab_size), torch.nan)

    def body() -> None:
        for index in range(decoder.num_pieces):
            decoder.piece(index, activations, caches)
            if index < len(decoder.layers):
                decoder.attend(index, activations, caches[index], meta)
        decoder.logits(activations.residual, logits)

    if not recorded:
        body()
        return logits
    workspace = tape.Workspace(torch.zeros(1 << 22, dtype=torch.uint8))
    played = host.record(body, workspace)
    assert logits.isnan().all() and not activations.residual.any()
    played.play()
    return logits
