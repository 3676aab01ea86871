"""The memory equation: total = weights + KV + activations + graphs + reserve. Pure arithmetic.

Knows bytes and counts; never a flag, a device or a tensor. The automatic share of weights and KV
follows SGLang's formulas for one GPU of one rank; `docs/memory.md` has them. "Total" is what the
engine may use: its weights and what is free beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 2**20
GB = 2**30

_BASE_BYTES = (512 + 128) * MIB  # SGLang's constant, and its share for one rank
_HOST_BASE_BYTES = 512 * MIB
_BYTES_PER_STEP_TOKEN = 3 * MIB // 2  # SGLang's activations, whatever the model
_MIN_STEP_TOKENS = 2048
_BYTES_PER_DECODE_GRAPH_ROW = 2 * MIB
_BYTES_PER_PREFILL_GRAPH = 8 * MIB
_LARGE_GPU_BYTES, _LARGE_GPU_RESERVE_BYTES = 60 * GB, 10 * GB
_TABLE_ENTRY_BYTES = 4


@dataclass(frozen=True, slots=True)
class Tier:
    """What suits GPUs of a size."""

    below_bytes: float
    chunk_size: int
    decode_rows: int  # of the largest decode graph


_TIERS = (
    Tier(20 * GB, 2048, 8),
    Tier(35 * GB, 4096, 48),
    Tier(60 * GB, 4096, 32),
    Tier(90 * GB, 8192, 256),
    Tier(160 * GB, 8192, 256),
    Tier(float("inf"), 16384, 512),
)


def tier_of(capacity_bytes: int) -> Tier:
    """capacity_bytes: the GPU's whole memory."""
    return next(tier for tier in _TIERS if capacity_bytes < tier.below_bytes)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model and the machine say; the automatic values follow from it."""

    max_position: int  # tokens
    bytes_per_token: int  # KV bytes of one token over all layers
    weight_bytes: int
    free_bytes: int  # beside the weights
    capacity_bytes: int  # the device's whole memory, whoever uses it
    step_bytes_per_token: int  # activations of a step, for each token that it computes
    step_bytes_per_row: int  # logits and what sampling makes of them, for each row that samples
    is_host: bool

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.free_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """What the largest step brings, and the page tables of its rows."""

    step_tokens: int  # prompt tokens
    rows: int
    pages_per_row: int

    def activation_bytes(self, facts: ModelFacts) -> int:
        """Peak of a step; both parts at once, though sampling begins when the forward is done."""
        return self.step_tokens * facts.step_bytes_per_token + self.rows * facts.step_bytes_per_row

    @property
    def table_bytes(self) -> int:
        return self.rows * self.pages_per_row * _TABLE_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Equation:
    """Bytes of every term; `reserve` is what the others leave, below zero if they don't fit."""

    total: int
    weights: int
    kv: int
    activations: int
    graphs: int
    step_tokens: int  # prompt tokens of the step whose activations these are

    @property
    def reserve(self) -> int:
        return self.total - self.weights - self.kv - self.activations - self.graphs

    def terms(self) -> dict[str, float]:
        """Total and terms in GB, rounded to two places so that they still add up."""
        cents = {
            name: round(100 * getattr(self, name) / GB)
            for name in ("total", "weights", "kv", "activations", "graphs")
        }
        cents["reserve"] = 2 * cents["total"] - sum(cents.values())
        return {name: amount / 100 for name, amount in cents.items()}

    def __str__(self) -> str:
        terms = {name: f"{amount:.2f} GB" for name, amount in self.terms().items()}
        return (
            f"total {terms['total']} = weights {terms['weights']} + KV {terms['kv']} "
            f"+ activations {terms['activations']} (peak at chunk size {self.step_tokens}) "
            f"+ graphs {terms['graphs']} + reserve {terms['reserve']}"
        )


def graph_bytes(facts: ModelFacts, decode_rows: int, prefill_graphs: int) -> int:
    """Set aside for captured graphs; a host's recordings work in the activations.

    decode_rows: of the largest decode graph. prefill_graphs: their number.
    """
    if facts.is_host:
        return 0
    return decode_rows * _BYTES_PER_DECODE_GRAPH_ROW + prefill_graphs * _BYTES_PER_PREFILL_GRAPH


def automatic_fraction(facts: ModelFacts, work: Work, prefill_tokens: int, graphs: int) -> float:
    """Share of the total for weights and KV: what activations, graphs and a reserve leave.

    prefill_tokens: of a usual step; `work` is the largest one. graphs: bytes.
    """
    needed = work.activation_bytes(facts) + work.table_bytes + graphs
    if facts.is_host:
        reserved = needed + min(_HOST_BASE_BYTES, facts.free_bytes // 8)
    else:
        tokens = max(prefill_tokens, _MIN_STEP_TOKENS)
        reserved = _BASE_BYTES + tokens * _BYTES_PER_STEP_TOKEN + graphs
        if facts.capacity_bytes > _LARGE_GPU_BYTES:
            reserved = max(reserved, _LARGE_GPU_RESERVE_BYTES)
        reserved = max(reserved, needed + _BASE_BYTES)
    share = max(0.0, 1 - reserved / facts.total_bytes)
    return math.floor(1000 * share) / 1000 if facts.is_host else round(share, 3)


def pool_pages(facts: ModelFacts, fraction: float, page_size: int) -> int:
    """Pages beside the weights in this share of the total; one page more is scratch."""
    static = int(fraction * facts.total_bytes) - facts.weight_bytes
    return max(0, static // (page_size * facts.bytes_per_token) - 1)


def kv_bytes(facts: ModelFacts, pool_tokens: int, page_size: int, work: Work) -> int:
    """Pool, scratch page and page tables."""
    return (pool_tokens + page_size) * facts.bytes_per_token + work.table_bytes


def rows_beside(facts: ModelFacts, pool: int, graphs: int, work: Work) -> int:
    """Rows whose logits and tables take at most half of what everything else leaves.

    pool: bytes of the KV pool. work: its rows don't count.
    """
    prompt = work.step_tokens * facts.step_bytes_per_token
    left = facts.free_bytes - pool - graphs - prompt
    each = facts.step_bytes_per_row + work.pages_per_row * _TABLE_ENTRY_BYTES
    return max(0, left // 2 // max(1, each))
