"""Which sizes of a step get a graph on a machine, and the memory set aside for them.

Knows what the flags ask for, SGLang's ladders and the size of the machine; captures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.engine.graph_config import GraphConfig, Wish, wish
from treadle.engine.memory import GB, ModelFacts, graph_bytes, tier_of
from treadle.graphs.buckets import Buckets, decode_ladder, prefill_ladder

_WHY_BACKEND: Mapping[str, str] = {
    "full": "a decode step is one graph",
    "breakable": "attention runs between the graphs",
}


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What an executor captures. A phase without graphs has no sizes."""

    decode_rows: tuple[int, ...]  # ascending, none above max_running_requests
    prefill_tokens: tuple[int, ...]  # ascending, none above the tokens of the largest step
    capture_budget_ms: float  # that a capture may hold up running requests; 0: only when none run
    warmup: bool  # the server is ready only when all are captured
    reserve_bytes: int
    padding: bool  # False: a decode graph serves its own number of rows only

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.decode_rows, self.prefill_tokens, self.padding)


class GraphSizes:
    """Decided in two steps, as rows that may run depend on the memory that graphs leave."""

    def __init__(
        self, config: GraphConfig, facts: ModelFacts, usual_tokens: int, largest_tokens: int
    ) -> None:
        """usual_tokens, largest_tokens: of steps.

        Raises: ConfigError.
        """
        self.reasons: dict[str, str] = {}  # by flat name
        self.values: dict[str, Any] = {}  # by flat name
        self.warnings: list[str] = []
        self._config = config
        self._facts = facts
        self._decode = self._chosen(wish(config, "decode"), "decode", "full")
        self._prefill = self._chosen(wish(config, "prefill"), "prefill", "breakable")
        self._prefill_tokens = self._ladder_of_prefill(usual_tokens, largest_tokens)

    def reserve_bytes(self, rows: int | None) -> int:
        """rows: that may run; None: any number."""
        return graph_bytes(self._facts, self._largest(rows)[0], len(self._prefill_tokens))

    def settle(self, rows: int) -> GraphSettings:
        """rows: max_running_requests."""
        return GraphSettings(
            decode_rows=self._ladder_of_decode(rows),
            prefill_tokens=self._prefill_tokens,
            capture_budget_ms=self._config.graph_capture_budget_ms,
            warmup=self._config.warmup_graphs,
            reserve_bytes=self.reserve_bytes(rows),
            padding=not self._config.disable_cuda_graph_padding,
        )

    def _chosen(self, asked: Wish, phase: str, usual: str) -> Wish | None:
        """None: no graphs."""
        name = f"cuda_graph_backend_{phase}"
        backend = asked.backend or usual
        why = asked.backend_from if asked.backend else _WHY_BACKEND[usual]
        if backend not in (usual, "disabled"):
            self.warnings.append(f"--cuda-graph-backend-{phase} {backend} is not built: "
                                 f"{usual} is used")  # fmt: skip
            backend, why = usual, f"{backend} is not built"
        self.reasons[name], self.values[name] = why, backend
        return None if backend == "disabled" else asked

    def _largest(self, rows: int | None) -> tuple[int, str]:
        """Rows of the largest decode graph, and why."""
        if self._decode is None:
            return 0, ""
        if self._decode.largest is not None:
            largest, why = self._decode.largest, self._decode.sizes_from
        elif self._facts.is_host:
            return rows or 0, "all that run at once"
        else:
            capacity = self._facts.capacity_bytes
            largest = tier_of(capacity).decode_rows
            why = f"usual for a GPU of {capacity / GB:.0f} GB"
        if rows is not None and rows < largest:
            return rows, "no more run at once"
        return largest, why

    def _ladder_of_decode(self, rows: int) -> tuple[int, ...]:
        asked = self._decode
        if asked is None:
            return self._without("cuda_graph_max_bs", "cuda_graph_bs")
        largest, why = self._largest(rows)
        padding = not self._config.disable_cuda_graph_padding
        if asked.sizes is not None:
            ladder, why_sizes = _cut(asked.sizes, largest), asked.sizes_from
        else:
            ladder = decode_ladder(largest, padding, dense=self._facts.is_host)
            usual = "close: padding takes time on a host" if self._facts.is_host else "SGLang's"
            why_sizes = usual if padding else "every size: no padding"
        self._tell("cuda_graph_max_bs", largest, why)
        self._tell("cuda_graph_bs", ladder, why_sizes)
        return ladder

    def _ladder_of_prefill(self, usual: int, most: int) -> tuple[int, ...]:
        names = "piecewise_cuda_graph_max_tokens", "piecewise_cuda_graph_tokens"
        asked = self._prefill
        if asked is None:
            return self._without(*names)
        largest, why, why_sizes = usual, "tokens of a usual step", "SGLang's"
        if asked.largest is not None:
            largest, why = asked.largest, asked.sizes_from
        if most < largest:
            largest, why = most, "no step has more"
        if asked.sizes is not None:
            ladder, why_sizes = _cut(asked.sizes, largest), asked.sizes_from
        else:
            ladder = _cut((*prefill_ladder(largest), largest), largest)
        self._tell(names[0], largest, why)
        self._tell(names[1], ladder, why_sizes)
        return ladder

    def _tell(self, name: str, value: object, why: str) -> None:
        self.values[name], self.reasons[name] = value, why

    def _without(self, *names: str) -> tuple[int, ...]:
        self.reasons |= dict.fromkeys(names, "there are no such graphs")
        return ()


def _cut(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """Ascending up to and with `largest`."""
    return tuple(sorted({min(size, largest) for size in sizes}))
