"""The gated feed-forward block.

Knows nothing of the layer around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from treadle.graphs.layers.linear import Linear, Projection
from treadle.graphs.models.spec import Activation
from treadle.kernels.activation import gelu_tanh_and_mul, silu_and_mul

_GATES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


@dataclass(frozen=True, slots=True)
class GatedMlp:
    gate_up: Linear  # [2 * intermediate, hidden], the gate's rows first
    down: Projection  # [hidden, intermediate]
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:  # [T, hidden] -> [T, hidden]
        return self.down(_GATES[self.activation](self.gate_up(x)))
