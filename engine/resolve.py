"""Gives every automatic setting its value and a reason.

Knows SGLang's rules of thumb and the facts of a model and a machine; reads nothing and loads
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.engine.advice import alternatives, sentence
from treadle.engine.config import CACHE_AWARE_POLICIES, EngineConfig
from treadle.engine.errors import ConfigError
from treadle.engine.graph_settings import GraphSettings, GraphSizes
from treadle.engine.memory import (
    GB,
    Equation,
    ModelFacts,
    Work,
    automatic_fraction,
    kv_bytes,
    pool_pages,
    rows_beside,
    tier_of,
)

HOST_MAX_RUNNING = 256  # logits of a step grow with it: 256 rows x 128k ids x 4 bytes = 128 MiB
HOST_CHUNK = 512  # above this a prefill gains nothing on a host and delays decodes longer
DEFAULT_CONTEXTS = 16  # full contexts that a host's automatic pool holds at most
MIN_POOL_TOKENS = 2  # a prompt of one token and what it generates

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings an engine runs with. `reasons` tells why, by flat name."""

    config: EngineConfig  # nothing automatic that this module decides is left in it
    context_length: int
    page_size: int
    chunked_prefill_size: int
    mem_fraction_static: float
    max_total_tokens: int  # whole pages
    max_running_requests: int
    graphs: GraphSettings
    equation: Equation
    reasons: Mapping[str, str]
    warnings: tuple[str, ...]


class Infeasible(ConfigError):
    """The settings don't fit into memory.

    alternatives: changes by flat name, each of which is enough; empty when no setting helps.
    """

    def __init__(self, message: str, alternatives: tuple[Mapping[str, Any], ...]) -> None:
        super().__init__(message)
        self.alternatives = alternatives


def context_length(config: EngineConfig, max_position: int) -> int:
    """Tokens of the longest sequence to serve.

    Raises: ConfigError when the model has fewer positions than asked for.
    """
    chosen = config.model.context_length or max_position
    if chosen > max_position:
        raise ConfigError(
            f"--context-length {chosen} is beyond the model's {max_position} positions"
        )
    return chosen


def resolve(config: EngineConfig, facts: ModelFacts) -> Resolved:
    """Raises: ConfigError; Infeasible names the flags to change, and to what."""
    try:
        return _Solver(config, facts).solve()
    except _DoesNotFit as problem:
        found = alternatives(config, lambda change: _try(config.replace(change), facts))
        raise Infeasible(f"{problem}; {sentence(found)}", found) from None


class _DoesNotFit(Exception):
    """Says which terms of the equation are too large."""


def _try(config: EngineConfig, facts: ModelFacts) -> EngineConfig | None:
    try:
        return _Solver(config, facts).solve().config
    except (_DoesNotFit, ConfigError):
        return None


class _Solver:
    """One attempt; collects a reason for every value."""

    def __init__(self, config: EngineConfig, facts: ModelFacts) -> None:
        self._config = config
        self._facts = facts
        self._reasons: dict[str, str] = {}
        self._warnings: list[str] = []

    def solve(self) -> Resolved:
        """Raises: _DoesNotFit."""
        facts, memory, schedule = self._facts, self._config.memory, self._config.schedule
        context = context_length(self._config, facts.max_position)
        self._pick("context_length", self._config.model.context_length, context, "the model's")
        page = self._pick("page_size", memory.page_size, 1, "shares prefixes to the token")
        chunk = self._chunk()
        usual = chunk if chunk > 0 else schedule.max_prefill_tokens
        largest = chunk if chunk > 0 else max(usual, context)
        rows = schedule.max_running_requests or (
            HOST_MAX_RUNNING if facts.is_host else tier_of(facts.capacity_bytes).decode_rows
        )
        sizes = self._graph_sizes(usual, largest)
        graphs = sizes.reserve_bytes(schedule.max_running_requests)
        expected = Work(largest, rows, pages_per_row=-(-context // page))
        fraction = self._pick(
            "mem_fraction_static",
            memory.mem_fraction_static,
            automatic_fraction(facts, expected, usual, graphs),
            f"what activations{'' if facts.is_host else ', graphs'} and a reserve leave",
        )
        tokens = self._pool_tokens(fraction, page, context)
        pool_bytes = tokens * facts.bytes_per_token
        running = self._running(tokens, context, rows_beside(facts, pool_bytes, graphs, expected))
        work = Work(largest, running, expected.pages_per_row)
        equation = Equation(
            facts.total_bytes,
            facts.weight_bytes,
            kv_bytes(facts, tokens, page, work),
            work.activation_bytes(facts),
            sizes.reserve_bytes(running),
            largest,
        )
        self._check(equation, running)
        settled = sizes.settle(running)
        found: dict[str, Any] = {
            "context_length": context,
            "page_size": page,
            "chunked_prefill_size": chunk,
            "mem_fraction_static": fraction,
            "max_total_tokens": tokens,
            "max_running_requests": running,
        }
        return Resolved(
            config=self._config.replace(found | sizes.values | self._policy()),
            graphs=settled,
            equation=equation,
            reasons=self._reasons | sizes.reasons,
            warnings=(*self._warnings, *sizes.warnings),
            **found,
        )

    def _pick(self, name: str, given: T | None, automatic: T, why: str) -> T:
        self._reasons[name] = why if given is None else "given"
        return automatic if given is None else given

    def _chunk(self) -> int:
        given = self._config.schedule.chunked_prefill_size
        if self._facts.is_host:
            return self._pick("chunked_prefill_size", given, HOST_CHUNK,
                              "a host gains nothing above it")  # fmt: skip
        capacity = self._facts.capacity_bytes
        return self._pick("chunked_prefill_size", given, tier_of(capacity).chunk_size,
                          f"usual for a GPU of {capacity / GB:.0f} GB")  # fmt: skip

    def _graph_sizes(self, usual: int, largest: int) -> GraphSizes:
        """usual, largest: tokens of steps."""
        facts = self._facts
        pool = self._config.memory.max_total_tokens or facts.total_bytes // facts.bytes_per_token
        return GraphSizes(self._config.graphs, facts, min(usual, pool), min(largest, pool))

    def _pool_tokens(self, fraction: float, page: int, context: int) -> int:
        """Whole pages. Raises: _DoesNotFit."""
        facts, memory = self._facts, self._config.memory
        limits: dict[str, int] = {}
        given = memory.max_total_tokens
        if given is not None:
            wanted = -(-given // page)
            limits["given" if wanted * page == given else "given, in whole pages"] = wanted
        elif facts.is_host and memory.mem_fraction_static is None:
            half = facts.free_bytes // 2 // facts.bytes_per_token
            limits["half of the free memory"] = half // page
            limits[f"{DEFAULT_CONTEXTS} full contexts"] = -(-DEFAULT_CONTEXTS * context // page)
        limits[f"what fits into {fraction:.3f} of the memory"] = pool_pages(facts, fraction, page)
        why = min(limits, key=limits.__getitem__)
        tokens = limits[why] * page
        if tokens < MIN_POOL_TOKENS:
            raise _DoesNotFit(
                f"the KV pool would hold {tokens} tokens: weights and pool may take "
                f"{fraction * facts.total_bytes / GB:.2f} GB ({fraction:.3f} of "
                f"{facts.total_bytes / GB:.2f} GB), the weights take "
                f"{facts.weight_bytes / GB:.2f} GB and a page of {page} tokens "
                f"{page * facts.bytes_per_token / GB:.6f} GB"
            )
        self._reasons["max_total_tokens"] = why
        if given is not None and tokens < given:
            self._warnings.append(
                f"--max-total-tokens {given} does not fit; the KV pool holds {tokens}"
            )
        if tokens < context:
            self._warnings.append(
                f"the KV pool holds {tokens} tokens, less than one context of {context}: "
                f"longer requests are refused"
            )
        return tokens

    def _running(self, tokens: int, context: int, rows: int) -> int:
        """rows: that the memory beside the pool carries."""
        usual = max(2048, min(tokens * 512 // context, 4096))
        limits = {
            "pool tokens / context length x 512, within 2048 and 4096": usual,
            "half of the pool's tokens": tokens // 2,
            "logits and tables of more would not fit": max(rows, 1),
        }
        if self._facts.is_host:
            limits["more slow each other down on a host"] = HOST_MAX_RUNNING
        given = self._config.schedule.max_running_requests
        if given is not None:
            limits = {"given": given, "half of the pool's tokens": tokens // 2}
        why = min(limits, key=limits.__getitem__)
        self._reasons["max_running_requests"] = why
        if given is not None and limits[why] < given:
            self._warnings.append(
                f"--max-running-requests {given} is lowered to {limits[why]}: {why}"
            )
        return limits[why]

    def _check(self, equation: Equation, running: int) -> None:
        """Raises: _DoesNotFit."""
        if equation.reserve < 0:
            needed = equation.activations + equation.graphs
            raise _DoesNotFit(
                f"a step of {equation.step_tokens} prompt tokens and {running} requests needs "
                f"{needed / GB:.2f} GB beside weights and KV pool, which leave "
                f"{(needed + equation.reserve) / GB:.2f} GB: {equation}"
            )

    def _policy(self) -> dict[str, str]:
        chosen = self._config.schedule.schedule_policy
        if chosen not in CACHE_AWARE_POLICIES or not self._config.memory.disable_radix_cache:
            return {}
        self._reasons["schedule_policy"] = f"{chosen} needs the prefix cache"
        self._warnings.append(f"--schedule-policy {chosen} needs the prefix cache: fcfs is used")
        return {"schedule_policy": "fcfs"}
