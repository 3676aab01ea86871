"""Pages of one KV group: which are free, who holds the others, and which must wait.

Knows page ids and command numbers only, never a request or a tensor.

A released page may be handed to a later step at once, since steps run in launch order. Any other
user (copy, transfer, host read) holds a fence while it touches pages; a fenced page is handed to
nobody, and such a user only gets pages whose last step is complete.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle.graphs.step import KvGroup


class OutOfPages(Exception):
    """More pages were asked for than can be handed out; nothing was taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Fence:
    """Pages that somebody outside the step sequence is reading or writing."""

    pages: tuple[int, ...]


class PagePool:
    """Free pages, reference counts and fences of one group. Not thread-safe: one task owns it."""

    def __init__(self, group: KvGroup) -> None:
        self.group = group
        # taken from the end: low ids first; ids travel as arrays, which copy by memcpy
        self._free = array("i", range(group.pages - 1, -1, -1))
        self._references = [0] * group.pages
        self._last_step = [0] * group.pages  # number of the last step that may touch the page
        self._fences: dict[int, int] = {}  # page -> fences on it
        self._parked: set[int] = set()  # released, but fenced

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.group.pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-num_tokens // self.group.page_size)

    def allocate(self, count: int) -> array[int]:
        """Takes pages for a step, each with one reference.

        Raises: OutOfPages.
        """
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked for, {len(self._free)} free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        for page in taken:
            self._references[page] = 1
        return taken

    def allocate_fenced(self, count: int, completed_step: int) -> tuple[array[int], Fence]:
        """Takes pages for a user outside the step sequence, with one reference and a fence.

        completed_step: every step up to this number is done on the device.
        Raises: OutOfPages when too few free pages are past their last step.
        """
        idle = [page for page in self._free if self._last_step[page] <= completed_step]
        if count > len(idle):
            raise OutOfPages(f"{count} idle pages asked for, {len(idle)} free and idle")
        taken = array("i", idle[len(idle) - count :])
        chosen = set(taken)
        self._free = array("i", (page for page in self._free if page not in chosen))
        for page in taken:
            self._references[page] = 1
        return taken, self.fence(taken)

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to pages that are in use."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Sequence[int], last_step: int) -> None:
        """Drops one reference; a page without any becomes free, or parked while it is fenced.

        last_step: number of the last launched step that may touch these pages.
        """
        for page in pages:
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            self._last_step[page] = max(self._last_step[page], last_step)
            if self._references[page] == 0:
                if page in self._fences:
                    self._parked.add(page)
                else:
                    self._free.append(page)

    def fence(self, pages: Iterable[int]) -> Fence:
        """Marks pages as touched from outside the step sequence until `lift`."""
        fence = Fence(tuple(pages))
        for page in fence.pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._fences[page] = self._fences.get(page, 0) + 1
        return fence

    def lift(self, fence: Fence) -> None:
        """Ends a fence; pages that were released meanwhile become free."""
        for page in fence.pages:
            left = self._fences[page] - 1
            if left:
                self._fences[page] = left
                continue
            del self._fences[page]
            if page in self._parked:
                self._parked.remove(page)
                self._free.append(page)

    def check_integrity(self, held: Iterable[int] = ()) -> None:
        """Every page is free, parked or referenced, exactly once.

        held: page ids with one entry per reference that the caller knows of.
        Raises: AssertionError that names the pages at fault.
        """
        known = [0] * self.group.pages
        for page in held:
            known[page] += 1
        wrong = [p for p in range(self.group.pages) if known[p] != self._references[p]]
        assert not wrong, f"references differ from what is held, pages {wrong[:8]}"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & self._parked, "a page is free and parked"
        for page in range(self.group.pages):
            is_idle = page in free or page in self._parked
            assert is_idle == (self._references[page] == 0), f"page {page} is lost or shared"
        assert all(page in self._fences for page in self._parked), "a parked page has no fence"
