"""Which pages each running request holds, in every KV group, and which the prefix tree owns.

Knows requests' lengths, page tables and the tree; never when a request runs or what its tokens are.

A page has one owner: a request, or the tree. Pages of whole, computed, leading tokens move to the
tree after each prefill chunk and at the end; a request keeps the tree's pages in use by a lock on
the node where its shared part ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from treadle.engine.page_pool import PagePool
from treadle.engine.page_tables import PageTables
from treadle.engine.radix_cache import RadixCache
from treadle.engine.request import Request
from treadle.graphs.step import KvGroup

GONE = -1  # place of a page that slid out of its group's window


class KvPages:
    """Owns one PagePool per group, keyed by the group's name as everything here is."""

    def __init__(self, groups: Sequence[KvGroup], cache: RadixCache | None = None) -> None:
        """cache: needs exactly one group, and one that keeps every page."""
        assert cache is None or (len(groups) == 1 and groups[0].window is None)
        self.pools = {group.name: PagePool(group) for group in groups}
        self._has_windows = any(pool.group.window is not None for pool in self.pools.values())
        self.cache = cache
        self.last_step = 0  # number of the last launched step, as the scheduler says
        self.tables = PageTables(self.pools)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the smallest pool can hold."""
        return min(pool.group.tokens for pool in self.pools.values())

    @property
    def page_size(self) -> int:
        """The widest group's: a sequence takes space in steps of at most this many tokens."""
        return max(pool.group.page_size for pool in self.pools.values())

    @property
    def available_tokens(self) -> int:
        """Tokens that pages can be had for at once: free, or cached and not in use."""
        evictable = self.cache.evictable_pages if self.cache else 0
        return min(
            (pool.num_free + evictable) * pool.group.page_size for pool in self.pools.values()
        )

    @property
    def num_used_tokens(self) -> int:
        """Tokens in pages that running requests need; cached ones that nobody uses don't count."""
        evictable = self.cache.evictable_pages if self.cache else 0
        return max(
            (pool.num_used - evictable) * pool.group.page_size for pool in self.pools.values()
        )

    def peek(self, request: Request) -> int:
        """How many tokens `admit` would find cached, without touching the tree."""
        if self.cache is None:
            return 0
        limit = len(request.token_ids) - 1  # at least one token is always computed
        return self.cache.peek(request.token_ids.tobytes(), request.namespace, limit)

    def admit(self, request: Request) -> None:
        """Locks the request's cached prefix; it holds no pages of its own yet."""
        request.pages = {name: array("i") for name in self.pools}
        request.num_shared = 0
        if self.cache is not None:
            limit = len(request.token_ids) - 1
            found = self.cache.match(request.token_ids.tobytes(), request.namespace, limit)
            self.cache.lock(found.node)
            request.node = found.node
            request.num_shared = found.num_tokens
            (name,) = self.pools
            request.pages[name] = found.pages
        request.num_cached = request.num_computed = request.num_scheduled = request.num_shared

    def withdraw(self, request: Request) -> None:
        """Undoes `admit` for a request that does not run after all."""
        if self.cache is not None:
            self.cache.unlock(request.node)
        request.pages, request.node = {}, None
        request.num_cached = request.num_computed = request.num_scheduled = request.num_shared = 0

    def place(self, request: Request) -> None:
        """Tells the device, with the next step, where an admitted request's cached prefix is."""
        if self.cache is not None:
            self.cache.count_hit(request.node)
        for name, pages in request.pages.items():
            self.tables.put(name, request.slot, 0, pages)

    def missing(self, request: Request, length: int) -> int:
        """Pages to allocate before the request can hold this many tokens, over all groups."""
        return sum(
            max(0, pool.pages_for(length) - len(request.pages[name]))
            for name, pool in self.pools.items()
        )

    def room_for(self, request: Request) -> int:
        """Tokens that the request can be extended by now."""
        return (
            min(
                len(request.pages[name]) * pool.group.page_size - request.num_scheduled
                for name, pool in self.pools.items()
            )
            + self.available_tokens
        )

    def extend(self, request: Request, length: int) -> None:
        """Gives the request pages for `length` tokens; the next step's page tables tell of them.

        Raises: OutOfPages; the caller made room before.
        """
        for name, pool in self.pools.items():
            held = request.pages[name]
            if len(held) * pool.group.page_size < length:
                pages = self._allocate(pool, pool.pages_for(length) - len(held))
                self.tables.put(name, request.slot, len(held), pages)
                held += pages

    def settle(self, request: Request, is_prefill: bool) -> None:
        """A step of the request is done: its new tokens are computed."""
        if is_prefill and self.cache is not None:
            self._commit(request)
        if self._has_windows:
            self._trim(request)

    def _commit(self, request: Request) -> None:
        """Moves whole computed pages to the tree; where it has them already, ours are freed."""
        if self.cache is None:
            return
        ((name, pool),) = self.pools.items()
        size, held = pool.group.page_size, request.pages[name]
        end = request.num_computed // size * size
        start = request.num_shared
        if end <= start:
            return
        first, last = start // size, end // size
        found = self.cache.insert(
            request.token_ids[start:end].tobytes(),
            held[first:last],
            request.namespace,
            after=request.node,
            priority=request.importance,
        )
        theirs = found.pages
        if theirs:
            last = first + len(theirs)
            pool.release(held[first:last], self.last_step)
            held[first:last] = theirs
            self.tables.put(name, request.slot, first, theirs)
        self.cache.lock(found.node)
        self.cache.unlock(request.node)
        request.node, request.num_shared = found.node, end

    def _trim(self, request: Request) -> None:
        """Releases pages that no later query of the request can see.

        Steps up to `num_computed` are done on the device, so nothing in flight reads them.
        """
        for name, pool in self.pools.items():
            window = pool.group.window
            if window is None:
                continue
            held = request.pages[name]
            first_visible = max(0, request.num_computed - window + 1) // pool.group.page_size
            gone = [page for page in held[:first_visible] if page != GONE]
            if gone:
                held[:first_visible] = array("i", [GONE]) * first_visible
                pool.release(gone, last_step=0)

    def release(self, request: Request, keep: bool) -> None:
        """The one way out for an admitted request.

        keep: whether its computed pages may be found by later requests.
        """
        if keep:
            self._commit(request)
        for name, pool in self.pools.items():
            own = request.pages[name][request.num_shared // pool.group.page_size :]
            pool.release([page for page in own if page != GONE], self.last_step)
        self.tables.drop(request.slot)
        if self.cache is not None:
            self.cache.unlock(request.node)
        request.pages, request.node, request.num_shared = {}, None, 0

    def flush(self) -> int:
        """Forgets every cached prefix that is not in use; returns the tokens freed."""
        if self.cache is None:
            return 0
        (pool,) = self.pools.values()
        pages = self.cache.clear()
        pool.release(pages, self.last_step)
        return len(pages) * pool.group.page_size

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises: AssertionError when a page or a lock is lost, shared or counted twice."""
        running = list(running)
        for name, pool in self.pools.items():
            first = {r: r.num_shared // pool.group.page_size for r in running}
            held = [p for r in running for p in r.pages[name][first[r] :] if p != GONE]
            if self.cache is not None:
                held += self.cache.pages()
            pool.check_integrity(held)
        if self.cache is not None:
            self.cache.check_integrity()
            assert running or not self.cache.protected_pages, "a lock outlived its request"

    def heal(self) -> bool:
        """Starts over with empty pools and an empty tree if pages were lost; whether they were.

        Counts only; the engine must be idle.
        """
        owned = self.cache.evictable_pages + self.cache.protected_pages if self.cache else 0
        is_whole = all(p.num_free + owned == p.group.pages for p in self.pools.values())
        if is_whole and not (self.cache and self.cache.protected_pages):
            return False
        self.pools = {name: PagePool(pool.group) for name, pool in self.pools.items()}
        self.tables = PageTables(self.pools)
        self.cache = self.cache.renewed() if self.cache else None
        return True

    def _allocate(self, pool: PagePool, count: int) -> array[int]:
        short = count - pool.num_free
        if short > 0 and self.cache is not None:
            pool.release(self.cache.evict(short), self.last_step)
        return pool.allocate(count)
