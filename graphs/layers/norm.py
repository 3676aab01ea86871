"""Root-mean-square norm with its weight.

Knows nothing of where in a model it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from treadle.kernels.rmsnorm import add_rms_norm, rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:  # [..., D]
        return rms_norm(x, self.weight, self.eps)

    def add(
        self,
        x: Tensor,  # [..., D]
        residual: Tensor,  # [..., D] becomes x + residual
    ) -> Tensor:
        """The norm of `x + residual`."""
        return add_rms_norm(x, residual, self.weight, self.eps)
