"""Which cached prefix goes first when pages run out: eviction policies as key functions.

Knows the facts of a tree's nodes, never the tree, a page id or a request.

tlru is Tail-Optimized LRU, arXiv:2510.15152: a conversation of L tokens whose next prompt adds
`next_prompt_estimate` tokens keeps its next prefill within `threshold` tokens as long as its first
L + next_prompt_estimate - threshold tokens stay cached. What is cached past that budget goes first,
oldest conversation first, and only then anything else, in the order of lru.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from treadle.engine.errors import ConfigError

HEAP_SLACK = 64  # stale entries that are not worth a compaction, however short the queue


class NodeFacts(Protocol):
    """What a policy may know of a leaf. Times count the tree's operations, lengths are tokens."""

    @property
    def last_access(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def hits(self) -> int: ...  # requests that used it, the one that computed it included
    @property
    def priority(self) -> int: ...  # the highest of the requests that inserted it
    @property
    def start(self) -> int: ...  # tokens before it
    @property
    def end(self) -> int: ...  # tokens before it and in it
    @property
    def reach(self) -> int: ...  # length of the longest sequence that was inserted through it
    @property
    def page_size(self) -> int: ...


Key = tuple[int, ...]


def whole(node: NodeFacts) -> int:
    """All tokens of the node."""
    return node.end - node.start


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """The evictable leaf with the smallest key loses pages from its end.

    key: order of eviction; depends on the node's facts only.
    spare: tokens that may go at this key, whole pages and at least one; if that leaves some, the
        rest of the node gets a new key.
    """

    name: str
    key: Callable[[NodeFacts], Key]
    spare: Callable[[NodeFacts], int] = whole


class Queued(NodeFacts, Protocol):
    stamp: int  # of its valid entry; 0: not in the queue. The queue alone writes it


N = TypeVar("N", bound=Queued)


class EvictionQueue(Generic[N]):
    """The nodes that may be evicted now, in the policy's order. No operation looks at all of them.

    A heap whose entries are replaced by newer ones instead of being searched: an entry is valid if
    it bears its node's stamp. Entries that do not are dropped when they come up, or all at once
    when they outnumber the valid ones.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, int, N]] = []
        self._num_valid = 0
        self._last_stamp = 0

    def put(self, node: N) -> None:
        """Adds a node, or moves it to where its facts place it now."""
        if not node.stamp:
            self._num_valid += 1
        self._last_stamp += 1
        node.stamp = self._last_stamp
        heappush(self._heap, (self._policy.key(node), node.stamp, node))
        if len(self._heap) > 2 * self._num_valid + HEAP_SLACK:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].stamp]
            heapify(self._heap)

    def discard(self, node: N) -> None:
        """Takes a node out, if it is in."""
        if node.stamp:
            node.stamp = 0
            self._num_valid -= 1

    def pop(self) -> N | None:
        """Takes out the first node; None when there is none."""
        while self._heap:
            _, stamp, node = heappop(self._heap)
            if stamp == node.stamp:
                self.discard(node)
                return node
        return None

    def check_integrity(self, nodes: Iterable[N]) -> None:
        """Raises: AssertionError unless exactly these nodes are queued, under their keys of now."""
        valid = {stamp: (key, node) for key, stamp, node in self._heap if stamp == node.stamp}
        queued = {id(node) for _, node in valid.values()}
        assert queued == {id(node) for node in nodes}, "the queue lacks a leaf, or holds another"
        assert len(valid) == len(queued) == self._num_valid, f"{self._num_valid} queued, not valid"
        for key, node in valid.values():
            assert key == self._policy.key(node), f"old key {key} of the node at {node.end} tokens"


def make_policy(name: str, config: Mapping[str, object]) -> EvictionPolicy:
    """The policy of `--radix-eviction-policy`, with `--radix-eviction-policy-config` applied.

    Raises: ConfigError that names the flag, the key and what is legal.
    """
    if name not in _POLICIES:
        raise ConfigError(
            f"--radix-eviction-policy {name}: unknown; choose from {', '.join(POLICY_NAMES)}"
        )
    make, options = _POLICIES[name]
    flag = "--radix-eviction-policy-config"
    for key, value in config.items():
        if key not in options:
            legal = ", ".join(options) or "no keys"
            raise ConfigError(f"{flag}: {name} takes {legal}, not {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or value < options[key].minimum:
            raise ConfigError(
                f"{flag}: {key} is an integer of at least {options[key].minimum}, not {value!r}"
            )
    return make(**{key: config.get(key, option.default) for key, option in options.items()})


def _slru(protected_threshold: int) -> EvictionPolicy:
    return EvictionPolicy(
        "slru", lambda node: (int(node.hits >= protected_threshold), node.last_access)
    )


def _tlru(threshold: int, next_prompt_estimate: int) -> EvictionPolicy:
    def past_budget(node: NodeFacts) -> int:
        budget = max(0, node.reach + next_prompt_estimate - threshold)
        past = min(node.end - budget, whole(node))
        return max(0, past) // node.page_size * node.page_size

    return EvictionPolicy(
        "tlru",
        key=lambda node: (-1 if past_budget(node) else 0, node.last_access),
        spare=lambda node: past_budget(node) or whole(node),
    )


def _fixed(name: str, key: Callable[[NodeFacts], Key]) -> Callable[..., EvictionPolicy]:
    return lambda: EvictionPolicy(name, key)


@dataclass(frozen=True, slots=True)
class _Option:
    default: int
    minimum: int


_POLICIES: dict[str, tuple[Callable[..., EvictionPolicy], dict[str, _Option]]] = {
    "lru": (_fixed("lru", lambda node: (node.last_access,)), {}),
    "lfu": (_fixed("lfu", lambda node: (node.hits, node.last_access)), {}),
    "slru": (_slru, {"protected_threshold": _Option(2, 1)}),
    "tlru": (_tlru, {"threshold": _Option(0, 0), "next_prompt_estimate": _Option(0, 0)}),
    "priority": (_fixed("priority", lambda node: (node.priority, node.last_access)), {}),
    "fifo": (_fixed("fifo", lambda node: (node.created,)), {}),
    "mru": (_fixed("mru", lambda node: (-node.last_access,)), {}),
    "filo": (_fixed("filo", lambda node: (-node.created,)), {}),
}
POLICY_NAMES = tuple(_POLICIES)
