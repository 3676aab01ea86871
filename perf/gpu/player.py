"""Plays the scheduler: plans for slots whose pages and lengths it keeps.

Knows plans and pages only. Plans follow from lengths alone, so they can be made ahead of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle.graphs.step import (
    Capacity,
    Executor,
    Int64s,
    Mode,
    PageTableUpdate,
    SamplingBatch,
    SlotInit,
    Step,
    StepHandle,
    StepPlan,
    StepResult,
)


@dataclass(frozen=True, slots=True)
class Work:
    """One row: a chunk of a prompt, or with no tokens a decode of the slot's last one."""

    slot: int
    tokens: Sequence[int] | None = None
    samples: bool = True


@dataclass(slots=True)
class _Slot:
    length: int = 0
    pages: list[int] = field(default_factory=list)
    known_pages: int = 0  # entries that the page table has
    is_fresh: bool = True  # the device has not heard of this sequence


class Player:
    """Makes steps in order; page ids are shuffled, so that neighbours in a sequence are not."""

    def __init__(self, capacity: Capacity, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        (self._group,) = capacity.groups
        self.vocab_size = capacity.vocab_size
        self._free = deque(self._random.permutation(self._group.pages).tolist())
        self._slots = [_Slot() for _ in range(capacity.slots)]
        self._seq = 0

    def tokens(self, count: int) -> list[int]:
        """Random ids."""
        ids: list[int] = self._random.integers(0, self.vocab_size, count).tolist()
        return ids

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def restart(self, slot: int, length: int = 0) -> None:
        """The slot's next row begins a sequence; so much KV stands in its pages, whatever it is."""
        self._free.extend(self._slots[slot].pages)
        self._slots[slot] = _Slot()
        self._grow(self._slots[slot], length)

    def step(
        self,
        rows: Sequence[Work],
        *,
        temperature: float = 0.0,
        constrained: bool = False,
        banned: Sequence[tuple[int, int]] = (),
    ) -> Step:
        """banned: pairs of a sampling row and a token id."""
        self._seq += 1
        inits = [(row.slot, self._slots[row.slot].length) for row in rows if self._is_fresh(row)]
        updates = [entry for row in rows for entry in self._extend(row)]
        table = np.array(updates, dtype=np.int32).reshape(-1, 3)
        count = len(rows)
        sampling = SamplingBatch(
            np.full(count, temperature, np.float32),
            all_greedy=temperature == 0,
            constrained=np.full(count, True) if constrained else None,
            banned=_pairs(banned) if banned else None,
        )
        update = PageTableUpdate(table[:, 0], table[:, 1], table[:, 2])
        plan = StepPlan(
            mode=_mode(rows),
            req_slot=np.array([row.slot for row in rows], np.int32),
            epoch=np.zeros(count, np.int32),
            q_len=np.array([_count(row) for row in rows], np.int32),
            from_host=np.array([row.tokens is not None for row in rows]),
            max_len=np.array([self._slots[row.slot].length for row in rows], np.int32),
            samples=np.array([row.samples for row in rows]),
            token_ids=np.array([i for row in rows for i in row.tokens or ()], np.int32),
            page_updates={self._group.name: update} if updates else {},
            slot_init=self._slot_init(inits) if inits else None,
            sampling=sampling,
        )
        return Step(self._seq, (plan,))

    def _is_fresh(self, row: Work) -> bool:
        return self._slots[row.slot].is_fresh

    def _extend(self, row: Work) -> Iterable[tuple[int, int, int]]:
        """Entries of the page table that the row needs: slot, index, page."""
        slot = self._slots[row.slot]
        self._grow(slot, _count(row))
        first, slot.known_pages, slot.is_fresh = slot.known_pages, len(slot.pages), False
        return [(row.slot, i, slot.pages[i]) for i in range(first, len(slot.pages))]

    def _grow(self, slot: _Slot, count: int) -> None:
        slot.length += count
        while len(slot.pages) * self._group.page_size < slot.length:
            slot.pages.append(self._free.popleft())

    def _slot_init(self, inits: Sequence[tuple[int, int]]) -> SlotInit:
        slots, lengths = zip(*inits, strict=True)
        seeds = self._random.integers(0, 2**63, len(inits)).astype(np.uint64)
        return SlotInit(np.array(slots, np.int32), np.array(lengths, np.int32), seeds)


def _count(row: Work) -> int:
    return 1 if row.tokens is None else len(row.tokens)


def _mode(rows: Sequence[Work]) -> Mode:
    decodes = {row.tokens is None for row in rows}
    return "mixed" if len(decodes) == 2 else "decode" if decodes == {True} else "prefill"


def _pairs(banned: Sequence[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    rows, ids = zip(*banned, strict=True)
    return np.array(rows, np.int64), np.array(ids, np.int64)


async def play(executor: Executor, steps: Iterable[Step]) -> list[StepResult]:
    """Keeps as many steps in flight as the executor takes; results in order."""
    flying, results = deque[StepHandle](), list[StepResult]()
    for step in steps:
        if len(flying) == executor.depth:
            results.append(await flying.popleft())
        flying.append(executor.launch(step))
    while flying:
        results.append(await flying.popleft())
    return results
