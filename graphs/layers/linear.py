"""Dense linear layers over plain tensors.

Knows nothing of what the features mean, nor where the weight came from.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from treadle.kernels.linear import linear


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
