"""An executor without a device: a deterministic token function over checked pages.

Knows no torch. It proves the host's bookkeeping: for each KV position it stores the hash of the
prefix written there, runs steps as late as the host allows, and fails on any stale read.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Generator
from typing import Any

import numpy as np

from treadle.graphs.step import (
    Bools,
    Capacity,
    GraphReport,
    Int64s,
    KvGroup,
    MemoryTag,
    Step,
    StepPlan,
    StepResult,
    UInt64s,
)

_MASK = 2**64 - 1
EMPTY = 0x9E3779B97F4A7C15  # hash of the empty prefix

TokenFunction = Callable[[int, int, int], int]
"""(prefix hash, prefix length, vocab size) -> the token that follows."""


class StaleRead(AssertionError):
    """A step read a KV position that does not hold what its sequence wrote there."""


def extend_hash(prefix: int, token: int) -> int:
    """Hash of a prefix with one more token (an xorshift-multiply mix of 64 bits)."""
    mixed = ((prefix ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return (mixed ^ (mixed >> 31)) or 1


def default_token(prefix: int, length: int, vocab_size: int) -> int:
    return (prefix >> 7) % vocab_size


class FakeHandle:
    """A launched step; it runs when it is awaited, or when a later one is."""

    def __init__(self, executor: FakeExecutor, step: Step, delay_turns: int) -> None:
        self.seq = step.seq
        self.step = step
        self.mask: Bools | None = None
        self.needs_mask = step.plan.is_constrained
        self.result: StepResult | Exception | None = None
        self._executor = executor
        self._delay_turns = delay_turns

    def done(self) -> bool:
        return self.result is not None

    def sample(self, mask: Bools | None) -> None:
        if not self.needs_mask:
            raise RuntimeError(f"step {self.seq} waits for no mask")
        self.needs_mask = False
        self.mask = mask

    def __await__(self) -> Generator[Any, None, StepResult]:
        for _ in range(self._delay_turns + 1):
            yield from asyncio.sleep(0).__await__()
        self._executor.run_until(self.seq)
        assert self.result is not None
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class FakeExecutor:
    """Implements `Executor`. Every check it makes raises into the step that failed it."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        depth: int = 2,
        token_function: TokenFunction = default_token,
        delay_turns: Callable[[], int] = lambda: 0,
        step_ms: float = 0.0,
        checks: bool = True,
    ) -> None:
        """delay_turns: loop turns that a step's result takes at least.
        step_ms: what a step takes on the virtual device (computed, not slept).
        checks: whether every KV position that a step reads is checked; a bench does without.
        """
        self.capacity = capacity
        self.depth = depth
        self.fail_next: Exception | None = None  # raised by the next step that runs
        self.fail_memory: Exception | None = None  # raised by the next release or resume
        self.is_lost = False
        self.can_release = True
        self.released: set[MemoryTag] = set()
        self.idle_ms = 0.0  # virtual device time without work between two steps
        self.num_steps = 0
        self._token_function = token_function
        self._delay_turns = delay_turns
        self._step_ms = step_ms
        self._checks = checks
        self._device_free_at: float | None = None  # seconds, virtual
        self._queue: deque[FakeHandle] = deque()
        self._launched: deque[FakeHandle] = deque()
        self._next_seq = 1
        self._length = np.zeros(capacity.slots, dtype=np.int64)
        self._last_token = np.zeros(capacity.slots, dtype=np.int64)
        self._prefix = [np.zeros(capacity.max_model_len + 1, np.uint64) for _ in self._length]
        self._stores = {group.name: _KvStore(group, capacity) for group in capacity.groups}

    def launch(self, step: Step) -> FakeHandle:
        self._launched = deque(handle for handle in self._launched if not handle.done())
        if self.is_lost:
            raise RuntimeError("the device is lost")
        if self.released:
            raise RuntimeError(f"step {step.seq} launched without {', '.join(self.released)}")
        if step.seq != self._next_seq:
            raise RuntimeError(f"step {step.seq} launched, {self._next_seq} is next")
        if len(self._launched) >= self.depth:
            raise RuntimeError(f"{self.depth} steps are in flight already")
        if self._launched and self._launched[-1].needs_mask:
            raise RuntimeError(f"step {self._launched[-1].seq} still waits for its mask")
        self._next_seq += 1
        handle = FakeHandle(self, step, self._delay_turns())
        self._queue.append(handle)
        self._launched.append(handle)
        self._advance_clock()
        return handle

    async def release(self, tags: Collection[MemoryTag]) -> None:
        """Runs what is queued; a step that reads lost KV later fails."""
        self._check_memory_call()
        if not self.can_release:
            raise RuntimeError("memory can be released only with --enable-memory-saver")
        await asyncio.sleep(0)
        if self._queue:
            self.run_until(self._queue[-1].seq)
        self.released.update(tags)
        if "kv_cache" in tags:
            for store in self._stores.values():
                store.wipe()

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        self._check_memory_call()
        await asyncio.sleep(0)
        self.released.difference_update(tags)

    def graphs(self) -> GraphReport:
        nothing: tuple[int, ...] = ()
        return GraphReport({"decode": nothing, "prefill": nothing}, {"decode": 0, "prefill": 0}, 0)

    def is_alive(self) -> bool:
        return not self.is_lost

    async def close(self) -> None:
        if self._queue:
            self.run_until(self._queue[-1].seq)
        self.is_lost = True

    def run_until(self, seq: int) -> None:
        """Runs queued steps in order, up to this one."""
        while self._queue and self._queue[0].seq <= seq:
            handle = self._queue.popleft()
            try:
                handle.result = self._run(handle)
            except Exception as error:
                handle.result = error

    def _check_memory_call(self) -> None:
        """Raises what an error of the device would."""
        if self.is_lost:
            raise RuntimeError("the device is lost")
        error, self.fail_memory = self.fail_memory, None
        if error is not None:
            raise error

    def _advance_clock(self) -> None:
        now = time.perf_counter()
        if self._device_free_at is not None:
            self.idle_ms += max(0.0, now - self._device_free_at) * 1e3
        start = now if self._device_free_at is None else max(now, self._device_free_at)
        self._device_free_at = start + self._step_ms / 1e3

    def _run(self, handle: FakeHandle) -> StepResult:
        if handle.needs_mask:
            raise RuntimeError(f"step {handle.seq} was awaited before its mask was given")
        error, self.fail_next = self.fail_next, None
        if error is not None:
            raise error
        plan = handle.step.plan
        self.num_steps += 1
        self._apply_updates(plan)
        tokens = np.zeros((plan.num_rows, 1), dtype=np.int32)
        taken = 0
        for row, (slot, q_len) in enumerate(zip(plan.req_slot, plan.q_len, strict=True)):
            if plan.from_host[row]:
                ids = plan.token_ids[taken : taken + q_len].tolist()
                taken += int(q_len)
            else:
                ids = [int(self._last_token[slot])]
            self._compute(int(slot), ids, int(plan.max_len[row]))
            if plan.samples[row]:
                tokens[row] = self._sample(int(slot), handle.mask, row)
                while _is_banned(plan, row, int(tokens[row, 0])):
                    tokens[row] = (tokens[row] + 1) % self.capacity.vocab_size
                self._last_token[slot] = tokens[row, 0]
        if taken != len(plan.token_ids):
            raise AssertionError(f"{len(plan.token_ids)} host tokens for {taken} places")
        return StepResult(handle.seq, tokens, plan.samples.astype(np.int32), self._step_ms)

    def _apply_updates(self, plan: StepPlan) -> None:
        for name, update in plan.page_updates.items():
            store = self._stores[name]
            if len(update.page_id) and not 0 <= update.page_id.min() <= update.page_id.max() < (
                store.group.pages
            ):
                raise AssertionError(f"{name}: a page id is out of range")
            store.table[update.req_slot, update.index] = update.page_id
        if plan.slot_init is None:
            return
        init = plan.slot_init
        for slot, length in zip(init.req_slot.tolist(), init.length.tolist(), strict=True):
            self._length[slot] = length
            self._prefix[slot][0] = EMPTY
            store = next(s for s in self._stores.values() if s.group.window is None)
            self._prefix[slot][1 : length + 1] = store.read(slot, 0, length)

    def _compute(self, slot: int, ids: list[int], max_len: int) -> None:
        start = int(self._length[slot])
        if start + len(ids) > max_len:
            raise AssertionError(f"slot {slot}: {start + len(ids)} tokens, at most {max_len} said")
        prefix = self._prefix[slot]
        if self._checks:
            for store in self._stores.values():
                store.check(slot, prefix, start)
        value = int(prefix[start])
        for offset, token in enumerate(ids):
            value = extend_hash(value, token)
            prefix[start + offset + 1] = value
        self._length[slot] = start + len(ids)
        if self._checks:
            for store in self._stores.values():
                store.write(slot, start, prefix[start + 1 : start + len(ids) + 1])

    def _sample(self, slot: int, mask: Bools | None, row: int) -> int:
        length = int(self._length[slot])
        vocab = self.capacity.vocab_size
        token = self._token_function(int(self._prefix[slot][length]), length, vocab)
        if mask is not None and not mask[row, token]:
            token = int(np.flatnonzero(mask[row])[0])
        return token


def _is_banned(plan: StepPlan, row: int, token: int) -> bool:
    banned = plan.sampling.banned
    return banned is not None and bool(((banned[0] == row) & (banned[1] == token)).any())


class _KvStore:
    """The KV memory of one group: at each position, the hash of the prefix that ends there."""

    def __init__(self, group: KvGroup, capacity: Capacity) -> None:
        self.group = group
        self.kv: UInt64s = np.zeros(group.tokens, dtype=np.uint64)
        pages = -(-capacity.max_model_len // group.page_size)
        self.table: Int64s = np.full((capacity.slots, pages), -1, dtype=np.int64)

    def wipe(self) -> None:
        """No hash is 0, so whatever is read before it is written again is stale."""
        self.kv.fill(0)
        self.table.fill(-1)

    def read(self, slot: int, start: int, end: int) -> UInt64s:
        hashes: UInt64s = self.kv[self._places(slot, start, end)]
        return hashes

    def write(self, slot: int, start: int, hashes: UInt64s) -> None:
        self.kv[self._places(slot, start, start + len(hashes))] = hashes

    def check(self, slot: int, prefix: UInt64s, end: int) -> None:
        """Everything a query at `end` sees must still stand there."""
        start = 0 if self.group.window is None else max(0, end - self.group.window + 1)
        found = self.read(slot, start, end)
        stale = np.flatnonzero(found != prefix[start + 1 : end + 1])
        if len(stale):
            raise StaleRead(f"{self.group.name}: slot {slot}, position {start + int(stale[0])}")

    def _places(self, slot: int, start: int, end: int) -> Int64s:
        positions = np.arange(start, end)
        size = self.group.page_size
        pages = self.table[slot, positions // size]
        if len(pages) and pages.min() < 0:
            raise AssertionError(f"{self.group.name}: slot {slot} has no page for a position")
        places: Int64s = pages * size + positions % size
        return places
