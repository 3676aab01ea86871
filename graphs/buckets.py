"""The padding ladder: which sizes of a step have a graph, and which of them serves a step.

Plain integers, shared by the memory equation and the executor; knows no tensor and no device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# SGLang's sizes: first, last (None: as far as asked for), step
_Spans = tuple[tuple[int, int | None, int], ...]
_DECODE: _Spans = ((1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 511, 16), (512, None, 32))
_DENSE_DECODE: _Spans = ((1, 8, 1), (10, 32, 2), (40, 64, 4), (72, 256, 8), (272, None, 16))
_PREFILL: _Spans = (
    (4, 32, 4),
    (48, 256, 16),
    (288, 512, 32),
    (576, 1024, 64),
    (1280, 4096, 256),
    (4608, None, 512),
)


def decode_ladder(max_rows: int, padding: bool = True, dense: bool = False) -> tuple[int, ...]:
    """Row buckets up to and with `max_rows`, ascending.

    padding: False has a bucket for every number of rows. dense: smaller steps, for devices on which
    a padded row costs as much as a real one.
    """
    if not padding:
        return tuple(range(1, max_rows + 1))
    rows = _up_to(max_rows, _DENSE_DECODE if dense else _DECODE)
    return rows if max_rows < 1 or rows[-1] == max_rows else (*rows, max_rows)


def prefill_ladder(max_tokens: int) -> tuple[int, ...]:
    """Token buckets up to `max_tokens`, ascending; empty below the smallest."""
    return _up_to(max_tokens, _PREFILL)


def _up_to(limit: int, spans: _Spans) -> tuple[int, ...]:
    return tuple(
        size
        for first, last, step in spans
        for size in range(first, min(limit if last is None else last, limit) + 1, step)
    )


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that have a graph, both ascending. Without padding a decode must fit exactly."""

    decode_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    padding: bool = True

    def rows_for(self, rows: int) -> int | None:
        """The smallest bucket for a decode of so many rows; None: no graph serves it."""
        bucket = _smallest(self.decode_rows, rows)
        return bucket if self.padding or bucket == rows else None

    def tokens_for(self, tokens: int) -> int | None:
        """The smallest bucket for a step of so many tokens; None beyond the ladder."""
        return _smallest(self.prefill_tokens, tokens)


def _smallest(ladder: Sequence[int], size: int) -> int | None:
    place = bisect_left(ladder, size)
    return ladder[place] if place < len(ladder) else None


GraphKind = Literal["decode", "decode_split", "head", "sample", "prefill"]


class GraphKey(NamedTuple):
    """Names one graph."""

    kind: GraphKind
    tokens: int
    rows: int
    variant: str = ""

    def __str__(self) -> str:
        size = f"tokens={self.tokens}" if self.kind == "prefill" else f"bs={self.rows}"
        return " ".join(filter(None, (self.kind, size, self.variant)))
