"""Token ids into their rows of the embedding.

Knows ids and rows; nothing of the layers after it.

Axes: T tokens, V rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from treadle.kernels.collective import Group, all_reduce
from treadle.kernels.rows import gather_part, gather_rows


@dataclass(frozen=True, slots=True)
class Embedding:
    weight: Tensor  # [V, hidden]

    def __call__(
        self,
        token_ids: Tensor,  # [T] int64
        out: Tensor,  # [T, hidden]
    ) -> None:
        gather_rows(self.weight, token_ids, out)


@dataclass(frozen=True, slots=True)
class SharedEmbedding:
    """Every rank has the rows of some ids; the others add zeros for them."""

    weight: Tensor  # [V, hidden]
    first_id: int  # whose row is the first
    group: Group | None

    def __call__(
        self,
        token_ids: Tensor,  # [T] int64
        out: Tensor,  # [T, hidden]
    ) -> None:
        gather_part(self.weight, token_ids, self.first_id, out)
        all_reduce(out, self.group)
