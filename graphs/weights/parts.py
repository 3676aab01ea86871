"""What a rank keeps of every checkpoint tensor, and where in its parameters that goes.

Knows descriptions only: no file and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.graphs.models.adapters.base import Placement
from treadle.graphs.models.adapters.registry import find_adapter
from treadle.graphs.models.parameters import Split
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.parallel import TensorParallel, local_spec, share


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor. Rows of `own` beyond it are padding."""

    whole: Placement  # in the whole model's parameters
    own: Placement  # in the rank's
    box: tuple[range, ...]  # what is kept, per dimension of the tensor


def rank_parts(spec: DecoderSpec, parallel: TensorParallel) -> list[Part]:
    """spec: of the whole model.

    Raises: ValueError when so many ranks cannot share it.
    """
    placements = find_adapter([spec.architecture]).placements
    own_places = placements(local_spec(spec, parallel))

    def kept(split: Split | None, size: int) -> range:
        return range(size) if split is None else share(spec, split, parallel)

    return [
        Part(
            whole,
            own,
            tuple(map(kept, (whole.row_split, whole.column_split), whole.shape)),
        )
        for whole, own in zip(placements(spec), own_places, strict=True)
    ]
