"""Which requests run in the next step, and what a step's result means for them.

Owns the waiting and running sets. Knows slots, pages and token ids; never text going out, a
transport or a tensor.

First come, first served: every running request that can sample decodes in every step, and up to
`chunked_prefill_size` prompt tokens ride along, so a long prompt never stops the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from treadle.engine.kv_pages import KvPages
from treadle.engine.output import FinishReason
from treadle.engine.request import Request, Status
from treadle.graphs.step import Capacity, Mode, SamplingBatch, SlotInit, Step, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part in a launched step."""

    request: Request
    epoch: int
    q_len: int
    samples: bool
    from_host: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """A step and what the host must remember of it until its result arrives."""

    step: Step
    rows: tuple[Row, ...]
    num_prefill_tokens: int
    num_new_requests: int

    @property
    def num_decode_rows(self) -> int:
        return sum(not row.from_host for row in self.rows)


class Scheduler:
    """One task owns it: no locks."""

    def __init__(
        self, capacity: Capacity, *, max_running_requests: int, chunked_prefill_size: int
    ) -> None:
        """chunked_prefill_size: prompt tokens per step; -1 puts whole prompts into one step."""
        self.pages = KvPages(capacity.groups)
        self.max_running = min(max_running_requests, capacity.slots)
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}  # in order of admission
        self._chunk = chunked_prefill_size if chunked_prefill_size > 0 else 2**31 - 1
        self._free_slots = list(range(capacity.slots - 1, -1, -1))
        self._seq = 0
        self._aborts: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens that no step has been planned for."""
        return sum(r.num_prefill for r in self.waiting) + sum(
            r.num_prefill - r.num_scheduled for r in self.running if r.is_prefilling
        )

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Marks the request; `reap` ends it. Harmless when it has ended already."""
        if request.status is not Status.FINISHED and not request.is_abort_wanted:
            request.is_abort_wanted = True
            self._aborts.append(request)

    def reap(self) -> list[Request]:
        """Ends the marked requests, in whatever queue they are, and returns them."""
        aborts, self._aborts = self._aborts, []
        ended = [request for request in aborts if request.status is not Status.FINISHED]
        for request in ended:
            self._finish(request, FinishReason("abort", message="the request was aborted"))
        return ended

    def schedule(self) -> Launch | None:
        """Plans the next step, or None when nothing can run."""
        rows = [self._decode_row(r) for r in self.running if not r.is_prefilling and r.may_sample]
        num_decode, budget = len(rows), self._chunk
        for request in self.running:
            if budget and request.is_prefilling:
                rows.append(self._prefill_row(request, budget))
                budget -= rows[-1].q_len
        admitted: list[Request] = []
        while budget and self.waiting and self._can_admit(self.waiting[0]):
            request = self.waiting.popleft()
            self._admit(request)
            admitted.append(request)
            rows.append(self._prefill_row(request, budget))
            budget -= rows[-1].q_len
        if not rows:
            return None
        self._seq += 1
        mode: Mode = "decode" if num_decode == len(rows) else "mixed" if num_decode else "prefill"
        plan = self._plan(mode, rows, admitted)
        num_prefill = sum(row.q_len for row in rows[num_decode:])
        return Launch(Step(self._seq, (plan,)), tuple(rows), num_prefill, len(admitted))

    def update(self, launch: Launch, result: StepResult) -> list[Request]:
        """Applies a step's result and returns the requests that have something to tell."""
        touched = []
        tokens = result.token_ids[:, 0].tolist()
        for row, token in zip(launch.rows, tokens, strict=True):
            request = row.request
            if request.epoch != row.epoch:
                continue  # ended meanwhile: its token is never seen by anybody
            request.num_computed += row.q_len
            if row.samples:
                request.num_in_flight -= 1
                request.token_ids.append(token)
                reason = self._reason_to_stop(request, token)
                if reason is not None:
                    self._finish(request, reason)
                touched.append(request)
            if request.status is Status.RUNNING:
                self.pages.trim(request)
        return touched

    def fail(self, launch: Launch, message: str) -> list[Request]:
        """Ends the requests of a step that raised, and returns them."""
        failed = [row.request for row in launch.rows if row.request.epoch == row.epoch]
        reason = FinishReason("abort", message=message, status_code=500)
        for request in failed:
            self._finish(request, reason)
        return failed

    def fail_all(self, message: str, status_code: int) -> list[Request]:
        """Ends everything, waiting or running, and returns it."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            self._finish(request, FinishReason("abort", message=message, status_code=status_code))
        return requests

    def check_integrity(self) -> None:
        """Raises: AssertionError when a page, a slot or a count is lost."""
        self.pages.check_integrity(self.running)
        slots = sorted([*self._free_slots, *(r.slot for r in self.running)])
        assert slots == list(range(len(slots))), "a slot is lost or shared"
        for request in self.running:
            request.check()

    def _can_admit(self, request: Request) -> bool:
        return (
            len(self.running) < self.max_running
            and bool(self._free_slots)
            and self.pages.fits(request.worst_case_tokens)
        )

    def _admit(self, request: Request) -> None:
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        self.pages.admit(request)
        self.running[request] = None

    def _decode_row(self, request: Request) -> Row:
        return self._row(request, 1, samples=True, from_host=False)

    def _prefill_row(self, request: Request, budget: int) -> Row:
        q_len = min(budget, request.num_prefill - request.num_scheduled)
        is_last = request.num_scheduled + q_len == request.num_prefill
        return self._row(request, q_len, samples=is_last, from_host=True)

    def _row(self, request: Request, q_len: int, *, samples: bool, from_host: bool) -> Row:
        request.num_scheduled += q_len
        request.num_in_flight += samples
        self.pages.extend(request, request.num_scheduled)
        return Row(request, request.epoch, q_len, samples, from_host)

    def _plan(self, mode: Mode, rows: list[Row], admitted: list[Request]) -> StepPlan:
        requests = [row.request for row in rows]
        temperature = [0.0 if r.params.is_greedy else r.params.temperature for r in requests]
        slot_init = None
        if admitted:
            slot_init = SlotInit(
                req_slot=_int32([r.slot for r in admitted]),
                length=_int32([r.num_cached for r in admitted]),
                seed=np.array([r.seed for r in admitted], dtype=np.uint64),
            )
        return StepPlan(
            mode=mode,
            req_slot=_int32([r.slot for r in requests]),
            epoch=_int32([row.epoch for row in rows]),
            q_len=_int32([row.q_len for row in rows]),
            from_host=np.array([row.from_host for row in rows], dtype=np.bool_),
            max_len=_int32([r.num_scheduled for r in requests]),
            samples=np.array([row.samples for row in rows], dtype=np.bool_),
            token_ids=_int32(list(_host_tokens(rows))),
            page_updates=self.pages.take_updates(),
            slot_init=slot_init,
            sampling=SamplingBatch(
                np.array(temperature, dtype=np.float32), all_greedy=not any(temperature)
            ),
        )

    def _reason_to_stop(self, request: Request, token: int) -> FinishReason | None:
        text = request.text
        is_stop_id = token in request.stop_ids
        if text is not None and text.has_stops and not is_stop_id:
            request.pending_text += text.push((token,))
            if text.matched is not None:
                return FinishReason("stop", matched=text.matched)
        if is_stop_id:
            return FinishReason("stop", matched=token)
        if len(request.token_ids) >= request.max_len:
            return FinishReason("length")
        return None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The one release path of finish, abort and failure."""
        request.epoch += 1
        request.num_in_flight = 0
        request.finish_reason = reason
        if request.status is Status.RUNNING:
            del self.running[request]
            self.pages.release(request, self._seq)
            self._free_slots.append(request.slot)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED


def _int32(values: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def _host_tokens(rows: Iterable[Row]) -> Iterator[int]:
    for row in rows:
        if row.from_host:
            end = row.request.num_scheduled
            yield from row.request.token_ids[end - row.q_len : end]
