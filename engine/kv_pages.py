"""Which pages each running request holds, in every KV group, and what it may still claim.

Knows requests' lengths and page tables, never when a request runs or what its tokens are.

Until requests can be retracted, a request is admitted only when its worst case fits beside the
worst cases of all others, so no step can run out of pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from treadle.engine.page_pool import PagePool
from treadle.engine.request import Request
from treadle.graphs.step import KvGroup, PageTableUpdate

GONE = -1  # place of a page that slid out of its group's window


class KvPages:
    """Owns one PagePool per group, keyed by the group's name as everything here is."""

    def __init__(self, groups: Sequence[KvGroup]) -> None:
        self.pools = {group.name: PagePool(group) for group in groups}
        self._reserved = dict.fromkeys(self.pools, 0)  # pages claimed by admitted requests
        self._updates: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self.pools}

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the smallest pool can hold."""
        return min(pool.group.tokens for pool in self.pools.values())

    @property
    def num_used_tokens(self) -> int:
        return max(pool.num_used * pool.group.page_size for pool in self.pools.values())

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of this worst case can be admitted now."""
        return all(
            self._reserved[name] + pool.pages_for(num_tokens) <= pool.group.pages
            for name, pool in self.pools.items()
        )

    def admit(self, request: Request) -> None:
        """Reserves the request's worst case; it holds no pages yet."""
        for name, pool in self.pools.items():
            self._reserved[name] += pool.pages_for(request.worst_case_tokens)
        request.pages = {name: [] for name in self.pools}

    def extend(self, request: Request, length: int) -> None:
        """Gives the request pages for `length` tokens; the next `take_updates` tells of them."""
        for name, pool in self.pools.items():
            held = request.pages[name]
            missing = pool.pages_for(length) - len(held)
            if missing > 0:
                first = len(held)
                held.extend(pool.allocate(missing))
                self._updates[name].extend(
                    (request.slot, index, held[index]) for index in range(first, len(held))
                )

    def trim(self, request: Request) -> None:
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
                held[:first_visible] = [GONE] * first_visible
                pool.release(gone, last_step=0)

    def release(self, request: Request, last_step: int) -> None:
        """The one way out for an admitted request: its pages and its claim.

        last_step: number of the last launched step.
        """
        for name, pool in self.pools.items():
            pool.release([p for p in request.pages[name] if p != GONE], last_step)
            self._reserved[name] -= pool.pages_for(request.worst_case_tokens)
        request.pages = {}

    def take_updates(self) -> dict[str, PageTableUpdate]:
        """Page-table entries since the last call, by group; groups without any are left out."""
        taken = {}
        for name, entries in self._updates.items():
            if entries:
                columns = np.array(entries, dtype=np.int32)
                taken[name] = PageTableUpdate(columns[:, 0], columns[:, 1], columns[:, 2])
                self._updates[name] = []
        return taken

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises: AssertionError when a page or a claim is lost, shared or counted twice."""
        running = list(running)
        for name, pool in self.pools.items():
            pool.check_integrity(p for r in running for p in r.pages[name] if p != GONE)
            claimed = sum(pool.pages_for(r.worst_case_tokens) for r in running)
            assert claimed == self._reserved[name], f"{name}: claims {self._reserved[name]}"
