"""In which order waiting requests are looked at: `--schedule-policy`, and priorities above it.

Knows requests' lengths, priorities and keys, and how much of a prompt is cached; never a page, a
budget or whether a request fits. The policies are SGLang's.

Priorities come first whatever the policy: it orders requests of equal importance. Within it ties
go to the earlier arrival.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Protocol

from treadle.engine.config import CACHE_AWARE_POLICIES, ScheduleConfig
from treadle.engine.request import Request

LPM_MAX_WAITING = 128  # above it matching every prompt costs more than the order gains
SHARED_TOKENS = 32  # a prefix that is worth waiting for while another request computes it
TOKEN_BYTES = 4
LEAST = -(2**64)  # importance of a request without a priority

_arrival = attrgetter("arrival_order")


class PrefixCache(Protocol):
    """What a policy asks of the prefix tree. Tokens are bytes of int32."""

    @property
    def page_size(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def evictable_pages(self) -> int: ...
    @property
    def protected_pages(self) -> int: ...

    def peek(self, tokens: bytes, namespace: Hashable, limit: int) -> int:
        """Cached tokens of the prefix, at most `limit`; changes nothing."""


class QueuePolicy:
    """Remembers its last answer, and gives it again while nothing changed that it depends on."""

    def __init__(
        self,
        config: ScheduleConfig,
        cache: PrefixCache | None,
        rng: random.Random | None = None,
    ) -> None:
        """cache: without one, the policies that need it are fcfs."""
        has_cache = cache is not None or config.schedule_policy not in CACHE_AWARE_POLICIES
        self.name = config.schedule_policy if has_cache else "fcfs"
        self._uses_priority = config.enable_priority_scheduling or self.name == "priority"
        self._sign = -1 if config.schedule_low_priority_values_first else 1
        self._default = config.default_priority_value
        self._matches = _Matches(cache) if cache is not None else None
        self._rng = rng or random.Random()
        self._basis: object = None  # what the last answer followed from
        self._ordered: list[Request] = []

    @property
    def is_arrival_order(self) -> bool:
        """Whether `order` always gives the order of arrival."""
        return self.name == "fcfs" and not self._uses_priority

    def use_cache(self, cache: PrefixCache) -> None:
        """From now on another tree is asked: the old one was given up."""
        self._matches, self._basis = _Matches(cache), None

    def importance(self, request: Request) -> int:
        """More is more; the same for all where priorities don't count."""
        if not self._uses_priority:
            return 0
        value = self._default if request.priority is None else request.priority
        return LEAST if value is None else self._sign * value

    def order(self, waiting: Sequence[Request], running: Iterable[Request]) -> list[Request]:
        """All waiting requests, the first to be admitted first. A new list."""
        changing: object = None
        if self.name == "routing-key":
            changing = Counter(r.routing_key for r in running if r.routing_key is not None)
        elif self.name == "random":
            changing = object()
        elif self._matches is not None and self.name in CACHE_AWARE_POLICIES:
            changing = self._matches.state
        basis = (list(waiting), changing)
        if basis != self._basis:
            self._basis = basis
            self._ordered = self._arrange(sorted(waiting, key=_arrival), changing)
        return self._ordered.copy()

    def _arrange(self, arrived: list[Request], changing: object) -> list[Request]:
        """arrived: in order of arrival."""
        if self._uses_priority:
            arrived.sort(key=self.importance, reverse=True)
        ordered = arrived
        match self.name:
            case "lof":
                ordered.sort(key=lambda r: r.prompt_len - r.max_len)
            case "random":
                self._rng.shuffle(ordered)
            case "routing-key":
                assert isinstance(changing, Counter)
                ordered.sort(key=_routing_rank(changing))
            case "lpm" if len(arrived) <= LPM_MAX_WAITING:
                ordered = self._by_prefix(arrived, _longest_first)
            case "dfs-weight":
                ordered = self._by_prefix(arrived, self._heaviest_first)
        if self._uses_priority and self.name not in ("fcfs", "priority"):
            ordered.sort(key=self.importance, reverse=True)
        return ordered

    def _by_prefix(
        self, arrived: list[Request], arrange: Callable[[dict[Request, int]], list[Request]]
    ) -> list[Request]:
        """Requests whose prefix another one is about to compute go last: later it is cached."""
        assert self._matches is not None
        lengths = self._matches.lengths(arrived)
        first: dict[Request, int] = {}
        later: list[Request] = []
        started: set[Hashable] = set()
        for request in arrived:
            head = self._matches.head(request) if lengths[request] <= SHARED_TOKENS else None
            if head is not None and head in started:
                later.append(request)
            else:
                first[request] = lengths[request]
                started.add(head)
        return arrange(first) + later

    def _heaviest_first(self, lengths: dict[Request, int]) -> list[Request]:
        assert self._matches is not None
        return depth_first(lengths, self._matches.page_size)


def _longest_first(lengths: dict[Request, int]) -> list[Request]:
    return sorted(lengths, key=lengths.__getitem__, reverse=True)


def _routing_rank(counts: Counter[str]) -> Callable[[Request], tuple[int, int, str]]:
    """Keys that run already first, the busiest of them foremost; unknown keys last."""

    def rank(request: Request) -> tuple[int, int, str]:
        key = request.routing_key
        return (1, 0, "") if key is None or key not in counts else (0, -counts[key], key)

    return rank


class _Matches:
    """How much of each waiting request is cached, asked again only when the tree changed.

    An exchange of as many pages and nodes as went goes unnoticed: the order is a bit stale then.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.page_size = cache.page_size
        self._cache = cache
        self._lengths: dict[Request, int] = {}
        self._state: object = None

    @property
    def state(self) -> tuple[int, int]:
        cache = self._cache
        return cache.num_nodes, cache.evictable_pages + cache.protected_pages

    def lengths(self, requests: Sequence[Request]) -> dict[Request, int]:
        """Cached tokens of each, in their order."""
        if self._state != self.state:
            self._state, self._lengths = self.state, {}
        known = self._lengths
        self._lengths = {r: known[r] if r in known else self._length(r) for r in requests}
        return self._lengths

    def head(self, request: Request) -> Hashable:
        """What requests that can share their first tokens have in common, None without enough."""
        size = -(-SHARED_TOKENS // self.page_size) * self.page_size
        if len(request.token_ids) <= size:  # the last token is always computed
            return None
        return request.namespace, request.token_ids[:size].tobytes()

    def _length(self, request: Request) -> int:
        tokens = request.token_ids
        return self._cache.peek(tokens.tobytes(), request.namespace, len(tokens) - 1)


_Item = tuple[bytes, int, Request]  # cached prefix, place in the order so far


def depth_first(lengths: dict[Request, int], page_size: int) -> list[Request]:
    """Requests by the tree of their cached prefixes, subtrees of more requests first.

    A request comes after those whose cached prefix continues its own; ties keep their order.
    lengths: cached tokens of each request, whole pages.
    """
    spaces: dict[Hashable, list[_Item]] = {}
    for place, (request, length) in enumerate(lengths.items()):
        prefix = request.token_ids[:length].tobytes()
        spaces.setdefault(request.namespace, []).append((prefix, place, request))
    unit = page_size * TOKEN_BYTES
    stack = [(sorted(space), 0) for space in _heaviest_first(spaces.values())]
    backwards: list[Request] = []
    while stack:
        items, depth = stack.pop()  # sorted; all share `depth` bytes
        depth = _common_bytes(items[0][0], items[-1][0], depth, unit)
        num_ending = sum(len(prefix) == depth for prefix, _, _ in items)  # the first ones
        backwards.extend(request for _, _, request in reversed(items[:num_ending]))
        below = _by_edge(items[num_ending:], depth, unit)
        stack += [(group, depth) for group in _heaviest_first(below)]
    backwards.reverse()
    return backwards


def _by_edge(items: list[_Item], depth: int, unit: int) -> list[list[_Item]]:
    """items: sorted, all longer than `depth`."""
    edges = groupby(items, key=lambda item: item[0][depth : depth + unit])
    return [list(group) for _, group in edges]


def _heaviest_first(groups: Iterable[list[_Item]]) -> list[list[_Item]]:
    return sorted(groups, key=lambda group: (-len(group), min(place for _, place, _ in group)))


def _common_bytes(a: bytes, b: bytes, start: int, unit: int) -> int:
    """Length of the common prefix in whole units, of which `start` bytes are known."""
    low, high = start // unit, min(len(a), len(b)) // unit
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * unit : middle * unit] == b[low * unit : middle * unit]:
            low = middle
        else:
            high = middle - 1
    return low * unit
