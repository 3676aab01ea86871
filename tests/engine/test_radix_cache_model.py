"""The prefix tree against a model without nodes: a dictionary of page-aligned prefixes.

The model keeps every fact per page and finds what to evict by looking at all pages each time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.engine.eviction import POLICY_NAMES, make_policy
from treadle.engine.radix_cache import Node, RadixCache

Prefix = tuple[str, tuple[int, ...]]  # namespace and tokens, whole pages
Entry = tuple[float, ...]

THRESHOLD, ESTIMATE = 3, 1  # tlru, in pages


@dataclass
class Page:
    page: int
    last_access: int
    created: int
    priority: int
    reach: int
    hits: int = 1


ORDERS: dict[str, Callable[[Page, int, int], Entry]] = {
    "lru": lambda p, start, size: (p.last_access,),
    "lfu": lambda p, start, size: (p.hits, p.last_access),
    "slru": lambda p, start, size: (p.hits >= 2, p.last_access),
    "tlru": lambda p, start, size: (
        start < p.reach + (ESTIMATE - THRESHOLD) * size, p.last_access
    ),
    "priority": lambda p, start, size: (p.priority, p.last_access),
    "fifo": lambda p, start, size: (p.created,),
    "mru": lambda p, start, size: (-p.last_access,),
    "filo": lambda p, start, size: (-p.created,),
}  # fmt: skip


class Model:
    def __init__(self, page_size: int, policy: str) -> None:
        self.size = page_size
        self.order = ORDERS[policy]
        self.pages: dict[Prefix, Page] = {}
        self.locks: list[Prefix] = []
        self.now = count(1)

    def prefixes(self, whole: Prefix) -> list[Prefix]:
        space, tokens = whole
        return [(space, tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def match(self, whole: Prefix) -> list[Prefix]:
        return [prefix for prefix in self.prefixes(whole) if prefix in self.pages]

    def held(self) -> set[Prefix]:
        return {prefix for lock in self.locks for prefix in self.prefixes(lock)}

    def insert(self, whole: Prefix, known: int, new: list[int], priority: int) -> list[int]:
        """Returns the tree's pages for what it had beyond `known` tokens."""
        now, present = next(self.now), []
        for prefix in self.prefixes(whole):
            end = len(prefix[1])
            page = new[(end - known) // self.size - 1] if end > known else -1
            if prefix not in self.pages:
                self.pages[prefix] = Page(page, now, now, priority, len(whole[1]))
                continue
            entry = self.pages[prefix]
            entry.priority = max(entry.priority, priority)
            entry.reach = max(entry.reach, len(whole[1]))
            if end > known:
                present.append(entry.page)
                entry.last_access = now
                entry.hits += 1
        return present

    def unlock(self, index: int) -> None:
        before = self.held()
        self.locks.pop(index)
        now = next(self.now)
        for prefix in before - self.held():
            self.pages[prefix].last_access = now

    def evict(self, num_pages: int) -> set[int]:
        held = self.held()
        gone: set[int] = set()
        while len(gone) < num_pages:
            inner = {(space, tokens[: -self.size]) for space, tokens in self.pages}
            leaves = [p for p in self.pages if p not in inner and p not in held]
            if not leaves:
                break
            first = min(
                leaves,
                key=lambda p: self.order(self.pages[p], len(p[1]) - self.size, self.size),
            )
            gone.add(self.pages.pop(first).page)
        return gone


class Pair:
    """The tree and its model, driven side by side."""

    def __init__(self, page_size: int, policy: str) -> None:
        config = {"threshold": THRESHOLD * page_size, "next_prompt_estimate": ESTIMATE * page_size}
        self.tree = RadixCache(page_size, make_policy(policy, config if policy == "tlru" else {}))
        self.model = Model(page_size, policy)
        self.size = page_size
        self.nodes: list[Node] = []  # parallel to the model's locks
        self.new_pages: Iterator[int] = count()

    def tokens(self, symbols: list[int]) -> tuple[int, ...]:
        """One page for each symbol; pages differ in their last token only."""
        return tuple(token for s in symbols for token in [*[0] * (self.size - 1), s])

    def admit(self, space: str, symbols: list[int], tail: int, lock: bool) -> None:
        """Match, as for a prompt with `tail` tokens beyond its last whole page."""
        tokens = self.tokens(symbols) + (0,) * (tail % self.size)
        limit = len(tokens) - 1
        expected = self.model.match((space, tokens[: max(limit, 0)]))
        raw = array("i", tokens).tobytes()
        assert self.tree.peek(raw, space, limit) == len(expected) * self.size
        found = self.tree.match(raw, space, limit)
        now = next(self.model.now)
        for prefix in expected:
            self.model.pages[prefix].last_access = now
        assert found.num_tokens == found.node.end == len(expected) * self.size
        assert found.pages.tolist() == [self.model.pages[prefix].page for prefix in expected]
        if lock:
            self.tree.count_hit(found.node)
            for prefix in expected:
                self.model.pages[prefix].hits += 1
            self.lock(found.node, (space, tokens[: found.num_tokens]))

    def insert(self, space: str, symbols: list[int], priority: int, lock: bool) -> None:
        self.add((space, self.tokens(symbols)), 0, None, priority, lock)

    def extend(self, choice: int, symbols: list[int], priority: int, lock: bool) -> None:
        """Insert after a locked node; its namespace's root if that is what is locked."""
        if self.nodes:
            index = choice % len(self.nodes)
            space, tokens = self.model.locks[index]
            whole = (space, tokens + self.tokens(symbols))
            self.add(whole, len(tokens), self.nodes[index], priority, lock)

    def add(self, whole: Prefix, known: int, after: Node | None, priority: int, lock: bool) -> None:
        space, tokens = whole
        pages = [next(self.new_pages) for _ in range((len(tokens) - known) // self.size)]
        part = array("i", tokens[known:]).tobytes()
        result = self.tree.insert(part, pages, space, after=after, priority=priority)
        present = self.model.insert(whole, known, pages, priority)
        assert result.pages.tolist() == present
        assert result.num_present_tokens == len(present) * self.size
        assert result.node.end == len(tokens)
        if lock:
            self.lock(result.node, whole)

    def lock(self, node: Node, whole: Prefix) -> None:
        self.tree.lock(node)
        self.nodes.append(node)
        self.model.locks.append(whole)

    def unlock(self, choice: int) -> None:
        if self.nodes:
            index = choice % len(self.nodes)
            self.tree.unlock(self.nodes.pop(index))
            self.model.unlock(index)

    def evict(self, num_pages: int) -> None:
        freed = self.tree.evict(num_pages).tolist()
        assert len(freed) == len(set(freed))
        assert set(freed) == self.model.evict(num_pages)

    def clear(self) -> None:
        assert set(self.tree.clear()) == self.model.evict(len(self.model.pages))

    def check(self) -> None:
        self.tree.check_integrity()
        owned = sorted(self.tree.pages())
        assert owned == sorted(page.page for page in self.model.pages.values())
        assert self.tree.protected_pages == len(self.model.held())
        assert self.tree.evictable_pages == len(owned) - len(self.model.held())


SPACES = st.sampled_from(["", "adapter"])
SYMBOLS = st.lists(st.integers(0, 2), max_size=7)
SMALL = st.integers(0, 20)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), SPACES, SYMBOLS, SMALL, st.booleans()),
        st.tuples(st.just("insert"), SPACES, SYMBOLS, st.integers(-2, 2), st.booleans()),
        st.tuples(st.just("extend"), SMALL, SYMBOLS, st.integers(-2, 2), st.booleans()),
        st.tuples(st.just("unlock"), SMALL),
        st.tuples(st.just("evict"), st.integers(0, 8)),
        st.tuples(st.just("clear")),
    ),
    min_size=20,
    max_size=60,
)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=40, deadline=None, database=None)
@given(operations=OPERATIONS)
def test_tree_agrees_with_the_model(
    policy: str, page_size: int, operations: list[tuple[object, ...]]
) -> None:
    pair = Pair(page_size, policy)
    for name, *arguments in operations:
        getattr(pair, str(name))(*arguments)
        pair.check()
    while pair.nodes:
        pair.unlock(0)
    while pair.model.pages:
        pair.evict(1)
        pair.check()
