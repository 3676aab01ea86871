"""How a model is shared out over ranks: what of it each one holds.

Knows a model's description and numbers of ranks; no checkpoint, no process and no transport.

Tensor parallelism as in Shoeybi et al., Megatron-LM (2019), section 3: a block's first matrix is
cut by its outputs, its second by its inputs, and one sum over the ranks ends the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from treadle.graphs.models.parameters import Split
from treadle.graphs.models.spec import DecoderSpec
from treadle.kernels.collective import Group

_ROW_MULTIPLE: Final = 16  # of the head's rows on a rank; what the host's matrix kernel takes


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank's place among those that share every layer."""

    rank: int = 0
    size: int = 1
    group: Group | None = None  # what sums over them; None for one rank

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size


SINGLE: Final = TensorParallel()


def local_spec(spec: DecoderSpec, parallel: TensorParallel) -> DecoderSpec:
    """The model as one rank holds it: parameters, KV and activations have these sizes.

    All ranks have the same. Its vocabulary is the rank's rows of the embedding and of the head,
    padding included: `share` says which of them are token ids.
    Raises: ValueError naming the numbers of ranks that can share the model.
    """
    size = parallel.size
    if size == 1:
        return spec
    if not _can_share(spec, size):
        legal = ", ".join(map(str, legal_sizes(spec, spec.num_heads)))
        raise ValueError(
            f"{size} ranks cannot share {spec.num_heads} query heads, {spec.num_kv_heads} kv heads "
            f"and an intermediate size of {spec.intermediate_size} evenly; legal for this model: "
            f"{legal}"
        )
    return replace(
        spec,
        vocab_size=_vocab_rows(spec, size),
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
    )


def legal_sizes(spec: DecoderSpec, up_to: int) -> tuple[int, ...]:
    """The numbers of ranks, `up_to` at most, that can share the model."""
    return tuple(size for size in range(1, up_to + 1) if _can_share(spec, size))


def share(spec: DecoderSpec, split: Split, parallel: TensorParallel) -> range:
    """The rank's part of a dimension of the whole model that is split.

    kv heads are held by several ranks where there are fewer of them than ranks. Of the vocabulary
    the last ranks have fewer ids than rows, or none.
    """
    rank, size = parallel.rank, parallel.size
    match split:
        case "heads":
            return _part(spec.q_size // size, rank)
        case "intermediate":
            return _part(spec.intermediate_size // size, rank)
        case "kv_heads":
            held = max(1, spec.num_kv_heads // size)
            first = rank * spec.num_kv_heads // size
            return range(first * spec.head_dim, (first + held) * spec.head_dim)
        case "vocab":
            rows = _part(_vocab_rows(spec, size), rank)
            return range(min(rows.start, spec.vocab_size), min(rows.stop, spec.vocab_size))


def _can_share(spec: DecoderSpec, size: int) -> bool:
    kv_heads = spec.num_kv_heads
    has_kv_heads = kv_heads % size == 0 or size % kv_heads == 0
    return spec.num_heads % size == 0 and spec.intermediate_size % size == 0 and has_kv_heads


def _part(size: int, rank: int) -> range:
    return range(rank * size, (rank + 1) * size)


def _vocab_rows(spec: DecoderSpec, size: int) -> int:
    if size == 1:
        return spec.vocab_size
    return -(-spec.vocab_size // (size * _ROW_MULTIPLE)) * _ROW_MULTIPLE
