"""Page-table entries on their way to the device: what changed since the last step.

Knows slots, indices and page ids; never who holds a page or why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from treadle.graphs.step import PageTableUpdate


class PageTables:
    """One list of entries per KV group, emptied by every step."""

    def __init__(self, groups: Iterable[str]) -> None:
        self._groups = {name: _Updates() for name in groups}

    def put(self, group: str, slot: int, first: int, pages: Sequence[int]) -> None:
        """The slot's pages from index `first` on are these."""
        self._groups[group].put(slot, first, pages)

    def drop(self, slot: int) -> None:
        """Forgets what was meant for a slot whose request is gone."""
        for updates in self._groups.values():
            updates.drop(slot)

    def take(self) -> dict[str, PageTableUpdate]:
        """Entries since the last call, by group; groups without any are left out."""
        return {name: u.take() for name, u in self._groups.items() if not u.is_empty}


class _Updates:
    """Entries of one group."""

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._indices: list[int] = []
        self._pages: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not self._pages

    def put(self, slot: int, first: int, pages: Sequence[int]) -> None:
        if len(pages) == 1:  # a decode row, many times a step
            self._slots.append(slot)
            self._indices.append(first)
            self._pages.append(pages[0])
            return
        self._slots += [slot] * len(pages)
        self._indices += range(first, first + len(pages))
        self._pages += pages

    def drop(self, slot: int) -> None:
        if slot in self._slots:
            keep = [place for place, other in enumerate(self._slots) if other != slot]
            self._slots = [self._slots[place] for place in keep]
            self._indices = [self._indices[place] for place in keep]
            self._pages = [self._pages[place] for place in keep]

    def take(self) -> PageTableUpdate:
        columns = (self._slots, self._indices, self._pages)
        self._slots, self._indices, self._pages = [], [], []
        return PageTableUpdate(*(np.array(column, dtype=np.int32) for column in columns))
