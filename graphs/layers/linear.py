"""Dense linear layers over plain tensors.

Knows nothing of what the features mean, nor where the weight came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from treadle.kernels.collective import Group, all_reduce
from treadle.kernels.linear import linear


class Projection(Protocol):
    """x W^T + b, wherever the parts of W are."""

    @property
    def weight(self) -> Tensor:
        """What this rank has of W."""

    @property
    def bias(self) -> Tensor | None:
        """What this rank adds."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], written into `out` when given."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(
        self,
        x: Tensor,  # [..., in]
        out: Tensor | None = None,  # written when given
    ) -> Tensor:  # [..., out]
        return linear(x, self.weight, self.bias, out)


@dataclass(frozen=True, slots=True)
class ReducedLinear:
    """A projection whose inputs are shared out: every rank has some columns of W, and all get the
    sum of what the ranks make of them.
    """

    weight: Tensor  # [out, in of this rank]
    bias: Tensor | None  # [out] on one rank only: it is summed too
    group: Group | None

    def __call__(
        self,
        x: Tensor,  # [T, in of this rank]
        out: Tensor | None = None,  # written when given
    ) -> Tensor:  # [T, out]
        result = linear(x, self.weight, self.bias, out)
        all_reduce(result, self.group)
        return result
