"""Sums and maxima over the ranks of a group, in place.

Knows tensors and groups; never what the ranks share out. While a tape is recorded a collective is
noted like any other call, and every rank must play it in the same order.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from treadle.kernels import host

# Numbers that are widened at once: bounds the copy, and is long enough for the link.
_WIDE_PIECE: Final = 1 << 20
_SUM: Final = ReduceOp(ReduceOp.SUM)
_MAX: Final = ReduceOp(ReduceOp.MAX)
_HALVES: Final = (torch.bfloat16, torch.float16)


class Work(Protocol):
    def wait(self) -> object:
        """Returns when the result may be used: on a GPU, by later work of the stream."""


class Group(Protocol):
    """The part of `torch.distributed.ProcessGroup` that is used here."""

    def size(self) -> int:
        """How many ranks there are."""

    def allreduce(self, tensors: list[Tensor], op: ReduceOp, /) -> Work:
        """Starts to reduce each tensor in place."""


def all_reduce(x: Tensor, group: Group | None) -> None:
    """x becomes its sum over the ranks, the same bits on each; contiguous. None: x is the sum."""
    if group is None:
        return
    # Two numbers are rounded once whatever the type; more would be rounded at every rank.
    is_coarse = x.is_cpu and x.dtype in _HALVES and group.size() > 2
    host.call(_sum_wide if is_coarse else _sum, x, group)


def all_reduce_max(x: Tensor, group: Group | None) -> None:
    """x becomes its maximum over the ranks; contiguous. None: x is it already."""
    if group is not None:
        host.call(_max, x, group)


def _sum(x: Tensor, group: Group) -> None:
    group.allreduce([x], _SUM).wait()


def _sum_wide(x: Tensor, group: Group) -> None:
    for piece in torch.split(x.view(-1), _WIDE_PIECE):
        wide = piece.float()
        _sum(wide, group)
        piece.copy_(wide)


def _max(x: Tensor, group: Group) -> None:
    group.allreduce([x], _MAX).wait()
