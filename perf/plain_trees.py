"""Two straightforward prefix trees, for the radix bench to stand beside.

Know nothing of namespaces, page sizes or policies: page size 1, least recently used first. Both
insert from the root, walk to it for every lock, and collect all leaves for an eviction.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(slots=True, eq=False)
class Run:
    """Node of the straightforward trees."""

    parent: Run | None
    tokens: list[int]
    pages: list[int]
    last_access: int = 0
    locks: int = 0
    children: dict[int, Run] = field(default_factory=dict)  # by first token


class DictPerNode:
    """Runs of tokens as lists, compared token by token."""

    name = "dict per node"

    def __init__(self) -> None:
        self.root = Run(None, [], [], locks=1)
        self.clock = 0

    def read(self, tokens: bytes) -> list[int]:
        return array("i", tokens).tolist()

    def hold(self, pages: array[int]) -> list[int]:
        return pages.tolist()

    def match(self, tokens: list[int], limit: int) -> tuple[Run, list[int]]:
        return self.descend(tokens[:limit])

    def descend(self, tokens: list[int]) -> tuple[Run, list[int]]:
        self.clock += 1
        node, pages = self.root, list[int]()
        while len(pages) < len(tokens):
            child = node.children.get(tokens[len(pages)])
            if child is None:
                break
            common = 0
            for ours, theirs in zip(child.tokens, tokens[len(pages) :], strict=False):
                if ours != theirs:
                    break
                common += 1
            if common < len(child.tokens):
                child = self.split(child, common)
            child.last_access = self.clock
            pages += child.pages
            node = child
        return node, pages

    def split(self, node: Run, at: int) -> Run:
        assert node.parent is not None
        upper = Run(node.parent, node.tokens[:at], node.pages[:at], node.last_access, node.locks)
        node.parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[at:], node.pages[at:]
        upper.children[node.tokens[0]] = node
        return upper

    def insert(
        self, tokens: list[int], pages: list[int], known: tuple[Run, int], end: int
    ) -> tuple[Run, int]:
        node, present = self.descend(tokens[:end])
        return self.add(node, tokens, pages, len(present), end), len(present)

    def add(self, node: Run, tokens: list[int], pages: list[int], start: int, end: int) -> Run:
        if start == end:
            return node
        leaf = Run(node, tokens[start:end], pages[start:end], self.clock)
        node.children[tokens[start]] = leaf
        return leaf

    def lock(self, node: Run | None, by: int = 1) -> None:
        while node is not None:
            node.locks += by
            node = node.parent

    def unlock(self, node: Run) -> None:
        self.lock(node, -1)

    def evict(self, num_pages: int) -> list[int]:
        heap, stack = [], [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and not node.locks:
                heap.append((node.last_access, id(node), node))
        heapify(heap)
        freed: list[int] = []
        while len(freed) < num_pages and heap:
            _, _, node = heappop(heap)
            freed += node.pages
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens[0]]
            if not parent.children and not parent.locks:
                heappush(heap, (parent.last_access, id(parent), parent))
        return freed


class DictPerToken(DictPerNode):
    """One node, with its dictionary, per token."""

    name = "dict per token"

    def descend(self, tokens: list[int]) -> tuple[Run, list[int]]:
        self.clock += 1
        node, pages = self.root, list[int]()
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            child.last_access = self.clock
            pages.append(child.pages[0])
            node = child
        return node, pages

    def add(self, node: Run, tokens: list[int], pages: list[int], start: int, end: int) -> Run:
        for place in range(start, end):
            leaf = Run(node, [tokens[place]], [pages[place]], self.clock)
            node.children[tokens[place]] = leaf
            node = leaf
        return node
