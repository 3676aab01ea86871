"""Prefix tree over token ids whose nodes own the KV pages of their tokens.

Knows token ids, page ids and counts, never a request, a page pool or what a page holds.

Tokens arrive as bytes, one little-endian int32 each, so that a node's tokens are compared by one
memory comparison; page ids leave as `array("i")`, which is copied the same way and which numpy
views without a copy. Neither is seen by the garbage collector. A node's children are found by the
bytes of their first page, the first nodes of a namespace by (namespace, first page).

Times are counts of the tree's own operations. A node is in use when a match or an insertion goes
through it, and until its last lock ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from treadle.engine.eviction import EvictionPolicy, EvictionQueue

TOKEN_BYTES = 4

Namespace = Hashable  # whatever else the KV depends on: adapter, weight version, salt


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A run of tokens and their pages. Callers may read it, the tree alone writes it.

    While a node is locked its `end` and the tokens before it stay; a split may add nodes above it.
    """

    parent: Node | None  # None: the root, or evicted
    edge: Hashable  # its key among the parent's children
    tokens: bytes
    pages: array[int]
    end: int  # tokens from the root to here, its own included
    last_access: int
    created: int
    hits: int
    priority: int  # this and reach: of sequences that end here or ended in a child that is gone
    reach: int
    holds: int = 0  # locks on this very node, and children that have holds
    stamp: int = 0
    children: dict[Hashable, Node] = field(default_factory=dict)

    @property
    def start(self) -> int:
        return self.end - len(self.tokens) // TOKEN_BYTES

    @property
    def page_size(self) -> int:
        return len(self.tokens) // TOKEN_BYTES // len(self.pages)


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix. Until `node` is locked, the next eviction may take it."""

    node: Node  # where the prefix ends; the root when nothing matched
    num_tokens: int  # whole pages
    pages: array[int]  # the tree's, in order


@dataclass(frozen=True, slots=True)
class Inserted:
    """What became of an insertion."""

    node: Node  # where the inserted sequence ends
    num_present_tokens: int  # leading tokens of the call that the tree had already
    pages: array[int]  # the tree's pages for those


class RadixCache:
    """Not thread-safe: one task owns it."""

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.policy = policy
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = Node(None, None, b"", array("i"), 0, 0, 0, 0, 0, 0, holds=1)
        self._queue: EvictionQueue[Node] = EvictionQueue(policy)
        self._clock = 0
        self._num_nodes = 0
        self._num_locks = 0
        self._evictable_pages = 0
        self._protected_pages = 0

    @property
    def evictable_pages(self) -> int:
        return self._evictable_pages

    @property
    def protected_pages(self) -> int:
        return self._protected_pages

    @property
    def num_nodes(self) -> int:
        """Nodes that own pages."""
        return self._num_nodes

    def match(self, tokens: bytes, namespace: Namespace, limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens, in whole pages.

        It counts as used now. A node is split if the prefix ends inside.
        """
        wanted = tokens[: max(limit, 0) * TOKEN_BYTES]
        path, partial, common = self._descend(self._root, wanted, namespace)
        if partial is not None:
            path.append(self._split(partial, common))
        now = self._tick()
        pages = array("i")
        for node in path:
            node.last_access = now
            pages.extend(node.pages)
        node = path[-1] if path else self._root
        self._requeue(node)
        return Match(node, node.end, pages)

    def peek(self, tokens: bytes, namespace: Namespace, limit: int) -> int:
        """Tokens that `match` would find; changes nothing."""
        wanted = tokens[: max(limit, 0) * TOKEN_BYTES]
        path, _, common = self._descend(self._root, wanted, namespace)
        return (path[-1].end if path else 0) + common // TOKEN_BYTES

    def count_hit(self, node: Node) -> None:
        """Counts one more request that uses the prefix ending at `node`.

        Apart from `match`, since a request that has to wait matches again and again.
        """
        step: Node | None = node
        while step is not None:
            step.hits += 1
            step = step.parent
        self._requeue(node)

    def insert(
        self,
        tokens: bytes,
        pages: Sequence[int],
        namespace: Namespace,
        *,
        after: Node | None = None,
        priority: int = 0,
    ) -> Inserted:
        """Adds what follows a locked prefix; the prefix itself costs nothing.

        tokens, pages: whole pages that follow `after`, computed, and the caller's. Pages of tokens
            that the tree lacks become the tree's. Those of the leading `num_present_tokens` stay
            the caller's, who frees them and uses the answer's pages instead.
        after: a node that the caller has locked, of this namespace; None or the root: the start.
        priority: the path is worth the highest of those that it was inserted with.
        """
        assert len(tokens) == len(pages) * self._page_bytes, "tokens do not fill the pages"
        start = self._root if after is None else after
        assert start.holds, "insertion after a node that is not locked"
        path, partial, common = self._descend(start, tokens, namespace)
        if partial is not None:
            path.append(self._split(partial, common))
        now = self._tick()
        present = array("i")
        for node in path:
            node.last_access = now
            node.hits += 1
            present.extend(node.pages)
        node = path[-1] if path else start
        if len(present) == len(pages):
            node.priority = max(node.priority, priority)
        else:
            end = start.end + len(tokens) // TOKEN_BYTES
            rest = tokens[len(present) * self._page_bytes :]
            edge = self._edge(node, rest[: self._page_bytes], namespace)
            own = array("i", pages[len(present) :])
            node = self._add(Node(node, edge, rest, own, end, now, now, 1, priority, end))
        self._requeue(node)
        return Inserted(node, len(present) * self.page_size, present)

    def lock(self, node: Node) -> None:
        """Keeps the path from the root to `node`, until as many calls of `unlock`."""
        self._num_locks += 1
        while True:
            node.holds += 1
            if node.holds > 1:
                return  # held already, and with it all that is above
            assert node.parent is not None, "an evicted node is locked"
            self._queue.discard(node)
            self._evictable_pages -= len(node.pages)
            self._protected_pages += len(node.pages)
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Ends one lock. Nodes that nobody holds any more were in use until now."""
        self._num_locks -= 1
        now = self._tick()
        while True:
            node.holds -= 1
            if node.holds > 0:
                return
            assert node.parent is not None and node.holds == 0, "unlocked more often than locked"
            self._protected_pages -= len(node.pages)
            self._evictable_pages += len(node.pages)
            node.last_access = now
            self._requeue(node)
            node = node.parent

    def evict(self, num_pages: int) -> array[int]:
        """Gives up pages of unlocked leaves in the policy's order, each leaf from its end.

        A node becomes a leaf when its last child goes. Returns `num_pages` page ids, or all that
        are evictable if there are fewer.
        """
        freed = array("i")
        while len(freed) < num_pages and (node := self._queue.pop()) is not None:
            spare = self.policy.spare(node) // self.page_size
            count = min(spare, num_pages - len(freed))
            freed.extend(node.pages[-count:])
            if count < len(node.pages):
                _trim(node, count)
                self._requeue(node)
            else:
                self._requeue(self._remove(node))
        self._evictable_pages -= len(freed)
        return freed

    def clear(self) -> array[int]:
        """Gives up every page outside locked paths."""
        return self.evict(self._evictable_pages)

    def renewed(self) -> RadixCache:
        """An empty tree of the same kind."""
        return RadixCache(self.page_size, self.policy)

    def pages(self) -> Iterator[int]:
        """Every page that the tree owns."""
        for node in _below(self._root):
            yield from node.pages

    def check_integrity(self) -> None:
        """Raises: AssertionError that says what is wrong."""
        nodes = list(_below(self._root))
        num_locks = _check_node(self._root, self._page_bytes) - 1
        num_locks += sum(_check_node(node, self._page_bytes) for node in nodes)
        assert self._num_locks == num_locks, f"{self._num_locks} locks counted, {num_locks} found"
        assert self._num_nodes == len(nodes), f"{self._num_nodes} nodes counted, {len(nodes)} found"
        owned = [page for node in nodes for page in node.pages]
        assert len(owned) == len(set(owned)), "a page is in the tree twice"
        protected = sum(len(node.pages) for node in nodes if node.holds)
        assert self._protected_pages == protected, f"{protected} pages are protected"
        assert self._evictable_pages == len(owned) - protected, "evictable pages are miscounted"
        self._queue.check_integrity(n for n in nodes if not n.holds and not n.children)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _edge(self, parent: Node, first_page: bytes, namespace: Namespace) -> Hashable:
        return (namespace, first_page) if parent is self._root else first_page

    def _descend(
        self, node: Node, tokens: bytes, namespace: Namespace
    ) -> tuple[list[Node], Node | None, int]:
        """The nodes below `node` that `tokens` covers, then one of which it covers some pages.

        The last number is the size of those in bytes. An incomplete last page finds nothing.
        """
        path: list[Node] = []
        size = self._page_bytes
        offset = 0
        edge = self._edge(node, tokens[:size], namespace)
        while (child := node.children.get(edge)) is not None:
            if not tokens.startswith(child.tokens, offset):
                return path, child, _common_bytes(child.tokens, tokens[offset:], size)
            path.append(child)
            offset += len(child.tokens)
            edge = tokens[offset : offset + size]
            node = child
        return path, None, 0

    def _requeue(self, node: Node) -> None:
        """To be called when a node's facts have changed, or whether it may be evicted."""
        if node.holds or node.children:
            self._queue.discard(node)
        else:
            self._queue.put(node)

    def _add(self, leaf: Node) -> Node:
        assert leaf.parent is not None
        leaf.parent.children[leaf.edge] = leaf
        self._queue.discard(leaf.parent)
        self._num_nodes += 1
        self._evictable_pages += len(leaf.pages)
        return leaf

    def _split(self, node: Node, size: int) -> Node:
        """Moves the first `size` bytes of a node into a new parent, and returns that.

        The node itself stays where its path ends, for those who hold it.
        """
        parent, cut = node.parent, size // self._page_bytes
        assert parent is not None
        upper = Node(
            parent, node.edge, node.tokens[:size], node.pages[:cut],
            node.start + size // TOKEN_BYTES, node.last_access, node.created, node.hits,
            node.priority, node.reach, holds=int(node.holds > 0),
        )  # fmt: skip
        parent.children[upper.edge] = upper
        node.parent, node.edge = upper, node.tokens[size : size + self._page_bytes]
        node.tokens, node.pages = node.tokens[size:], node.pages[cut:]
        upper.children[node.edge] = node
        self._num_nodes += 1
        self._requeue(node)
        return upper

    def _remove(self, leaf: Node) -> Node:
        """Takes a leaf out of the tree; returns its parent, which inherits from it."""
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        leaf.parent = None
        parent.priority = max(parent.priority, leaf.priority)
        parent.reach = max(parent.reach, leaf.reach)
        self._num_nodes -= 1
        return parent


def _below(root: Node) -> Iterator[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def _common_bytes(tokens: bytes, other: bytes, size: int) -> int:
    """Length of the common beginning in whole pages of `size` bytes; the first page is common.

    Bisection in which no byte is compared twice.
    """
    same, differs = 1, min(len(tokens), len(other)) // size + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if other.startswith(tokens[same * size : middle * size], same * size):
            same = middle
        else:
            differs = middle
    return same * size


def _trim(leaf: Node, num_pages: int) -> None:
    """Cuts pages off the end of a leaf that has more."""
    num_tokens = num_pages * leaf.page_size
    leaf.end -= num_tokens
    leaf.tokens = leaf.tokens[: -num_tokens * TOKEN_BYTES]
    del leaf.pages[-num_pages:]


def _check_node(node: Node, page_bytes: int) -> int:
    """Checks a node against its children; returns the locks on it alone."""
    where = f"at {node.end} tokens"
    assert len(node.tokens) == len(node.pages) * page_bytes, f"tokens do not fill pages {where}"
    assert node.reach >= node.end, f"reach {node.reach} {where}"
    for edge, child in node.children.items():
        first = child.tokens[:page_bytes]
        assert child.parent is node and child.pages, f"a child is lost or empty {where}"
        assert child.edge == edge, f"a child is filed under another key {where}"
        assert (edge[1] if isinstance(edge, tuple) else edge) == first, f"wrong child key {where}"
        assert child.start == node.end, f"a child starts at {child.start} {where}"
    locks = node.holds - sum(child.holds > 0 for child in node.children.values())
    assert locks >= 0, f"{node.holds} holds are fewer than the held children {where}"
    return locks
