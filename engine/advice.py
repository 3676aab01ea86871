"""What to change when settings don't fit into memory: values that were tried and work.

Knows which flags take memory and in which order giving them up costs least; never a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

from treadle.engine.config import EngineConfig
from treadle.engine.settings import flag

Change = Mapping[str, Any]  # by flat name; None: leave the flag out
Attempt = Callable[[Change], EngineConfig | None]
"""Resolves with a change; None when that doesn't fit either."""

WANTED = 2
_FRACTIONS = tuple(percent / 100 for percent in range(99, 0, -1))
_STEPS = tuple(2**exponent for exponent in range(16, -1, -1))
_LEAST = {"chunked_prefill_size": 16, "max_total_tokens": 64, "context_length": 64}
_RIVALS = {"max_total_tokens": "mem_fraction_static", "cuda_graph_max_bs": "cuda_graph_bs"}
_SMALLEST: Change = {
    "mem_fraction_static": None, "chunked_prefill_size": 1, "max_total_tokens": 64,
    "cuda_graph_max_bs": 1, "cuda_graph_bs": None, "max_running_requests": 1, "page_size": 1,
    "context_length": 64,
}  # fmt: skip
_ORDER = (  # cheapest first
    "mem_fraction_static",
    "chunked_prefill_size",
    "max_total_tokens",
    "cuda_graph_max_bs",
    "max_running_requests",
    "page_size",
    "context_length",
)


def alternatives(config: EngineConfig, attempt: Attempt) -> tuple[Change, ...]:
    """The two cheapest changes of one flag that are enough; else one of two flags, if any is."""
    given = config.values()
    found = [change for name in _ORDER if (change := _first(_ladder(name, given), attempt))]
    if found:
        return tuple(found[:WANTED])
    if not any(attempt({**_SMALLEST, **fraction}) for fraction in _ladder(_ORDER[0], _SMALLEST)):
        return ()
    for names in combinations(_ORDER, 2):
        both = product(*(_ladder(name, given) for name in names))
        change = _first(({**a, **b} for a, b in both if not a.keys() & b.keys()), attempt)
        if change:
            return (change,)
    return ()


def sentence(changes: tuple[Change, ...]) -> str:
    """The changes as advice to the user."""
    if not changes:
        return "no setting helps: free memory or serve a smaller model"
    return "set " + ", or ".join(map(_words, changes))


def _words(change: Change) -> str:
    given = [f"{flag(name)} {value}" for name, value in change.items() if value is not None]
    dropped = [flag(name) for name, value in change.items() if value is None]
    return " and ".join(given) + "".join(f" without {name}" for name in dropped)


def _ladder(name: str, given: Mapping[str, Any]) -> Iterator[Change]:
    """Changes of one flag from the mildest to the last resort."""
    if name == "mem_fraction_static":
        if given[name] is not None:
            yield {name: None}
        yield from ({name: fraction} for fraction in _FRACTIONS)
        return
    rival = _RIVALS.get(name)
    without = {rival: None} if rival and given[rival] is not None else {}
    now = given[name] or (1 if name == "page_size" else _STEPS[0] + 1)
    least = _LEAST.get(name, 1)
    for value in _STEPS:
        if value >= least and (value < now or now == -1 or name == "max_total_tokens"):
            yield {name: value, **without}


def _first(ladder: Iterator[Change], attempt: Attempt) -> Change | None:
    for change in ladder:
        resolved = attempt(change)
        if resolved is None:
            continue
        now = resolved.values()
        if any(value is not None and now[name] < value for name, value in change.items()):
            continue  # it would be lowered
        is_alone = len(change) == 1
        chosen = {
            name: now[name] if is_alone or value is not None else None
            for name, value in change.items()
        }
        if attempt(chosen):
            return chosen
    return None
