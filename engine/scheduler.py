"""Which requests run in the next step, and what a step's result means for them.

Owns the waiting and running sets. Knows slots, pages and token ids; never text going out, a
transport or a tensor. Orders, budgets, estimates and victims are `policy`'s, `admission`'s,
`estimator`'s and `retraction`'s.

Every running request that can sample decodes in every step, and prompt tokens ride along; without
`mixes` a step holds either prompt tokens, if there are any to compute, or decodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.engine.admission import Admission, Limits
from treadle.engine.estimator import OutputEstimator
from treadle.engine.kv_pages import KvPages
from treadle.engine.output import FinishReason
from treadle.engine.planner import Launch, Planner, Row
from treadle.engine.request import Request, Status
from treadle.engine.retraction import Pressure, RetractionRules
from treadle.engine.waiting import WaitingQueue
from treadle.graphs.step import Capacity, StepResult

logger = logging.getLogger("treadle")


@dataclass(frozen=True, slots=True)
class Rules:
    """What stays the same over a scheduler's life."""

    limits: Limits
    retraction: RetractionRules
    mixes: bool = True  # decodes ride along with prompt tokens
    continuous_decode_steps: int = 1  # decode steps between two looks at the queue


class Scheduler:
    """One task owns it: no locks."""

    def __init__(
        self,
        capacity: Capacity,
        rules: Rules,
        pages: KvPages,
        waiting: WaitingQueue,
        estimator: OutputEstimator,
    ) -> None:
        self.pages = pages
        self.waiting = waiting
        self.running: dict[Request, None] = {}  # in order of admission
        self.num_retracted = 0
        self._rules = rules
        self._estimator = estimator
        self._admission = Admission(rules.limits, pages, estimator)
        self._planner = Planner(pages)
        self._pressure = Pressure(rules.retraction, pages, estimator, self._retract)
        self._free_slots = list(range(capacity.slots - 1, -1, -1))
        self._launched: dict[int, Launch] = {}  # by sequence number, until the result is in
        self._decode_streak = 0
        self._aborts: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not (self.waiting or self.running or self._launched)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens that no step has been planned for."""
        return sum(len(r.token_ids) for r in self.waiting) + sum(
            r.num_prefill - r.num_scheduled for r in self.running if r.is_prefilling
        )

    def submit(self, request: Request) -> Request | None:
        """Queues a request; returns the one that a full queue dropped for it, already ended.

        Raises: QueueFull.
        """
        dropped = self.waiting.room_for(request)
        if dropped is not None:
            message = "dropped from a full queue by a request of higher priority"
            self._finish(dropped, FinishReason("abort", message=message, status_code=503))
        self.waiting.put(request)
        return dropped

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
        """Plans the next step, or None when nothing can run before a result comes in."""
        decoding = [r for r in self.running if not r.is_prefilling and r.may_sample]
        reserved = self._pressure.make_room(decoding, self.running, bool(self._launched))
        if reserved is None:
            return None
        decoding = [r for r in decoding if r.status is Status.RUNNING]
        self._admit(decoding, reserved)
        decoding = [r for r in decoding if r.status is Status.RUNNING]
        prefilling = [r for r in self.running if r.is_prefilling]
        num_running = len(self.running) - len(prefilling)
        if prefilling and not self._rules.mixes:
            decoding, reserved = [], 0
        rows = [self._planner.decode_row(request) for request in decoding]
        rows += self._prefill_rows(prefilling, len(decoding))
        if not rows:
            is_stuck = bool(self.running) and not self._launched
            return self.schedule() if is_stuck and self._pressure.unblock(self.running) else None
        self._decode_streak = self._decode_streak + 1 if decoding and not prefilling else 0
        launch = self._planner.plan(rows, num_running)
        self._launched[launch.step.seq] = launch
        return launch

    def update(self, launch: Launch, result: StepResult) -> list[Request]:
        """Applies a step's result and returns the requests that have something to tell."""
        del self._launched[launch.step.seq]
        touched = []
        tokens = result.token_ids[:, 0].tolist()
        for row, token in zip(launch.rows, tokens, strict=True):
            request = row.request
            if request.epoch != row.epoch:
                continue  # ended or started anew meanwhile: nobody ever sees its token
            if request.status is Status.RUNNING:
                request.num_computed += row.q_len
                self.pages.settle(request, row.from_host)
            if row.samples:
                request.num_in_flight -= 1
                request.token_ids.append(token)
                reason = _reason_to_stop(request, token)
                if reason is not None:
                    self._finish(request, reason)
                touched.append(request)
        if launch.num_decode_rows:
            self._estimator.step()
        if not self.has_work:
            self._estimator.idle()
        return touched

    def fail(self, launch: Launch, message: str) -> list[Request]:
        """Ends the requests of a step that raised, and returns them."""
        self._launched.pop(launch.step.seq, None)
        failed = [row.request for row in launch.rows if row.request.epoch == row.epoch]
        for request in failed:
            self._finish(request, FinishReason("abort", message=message, status_code=500))
        return failed

    def fail_all(self, message: str, status_code: int) -> list[Request]:
        """Ends everything, waiting or running, and returns it."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            self._finish(request, FinishReason("abort", message=message, status_code=status_code))
        return requests

    def lose_kv(self) -> None:
        """No KV survives: running requests start over with their tokens, nothing stays cached.

        No step may be in flight.
        """
        assert not self._launched, "a step in flight uses pages"
        for request in list(self.running):
            self._retract(request)
        self.pages.flush()

    def check_integrity(self) -> None:
        """Raises: AssertionError when a page, a slot or a count is lost."""
        self.pages.check_integrity(self.running)
        slots = sorted([*self._free_slots, *(r.slot for r in self.running)])
        assert slots == list(range(len(slots))), "a slot is lost or shared"
        for request in self.running:
            request.check()

    def heal_when_idle(self) -> None:
        """Finds lost pages by count and starts over with whole pools; the server lives on."""
        if self.is_idle and self.pages.heal():
            self.waiting.use_cache(self.pages.cache)
            logger.error("KV pages were lost; the pools and the prefix cache are made anew")

    def _admit(self, decoding: Sequence[Request], reserved: int) -> None:
        """Starts waiting requests in the policy's order until one doesn't fit."""
        steps = self._rules.continuous_decode_steps
        if not self.waiting or (decoding and self._decode_streak % steps):
            return
        shared = len(decoding) if self._rules.mixes else 0
        budget = self._admission.budget(self.running, shared, reserved)
        admitted: list[Request] = []
        for request in self.waiting.in_order(self.running):
            if budget.is_spent:
                break
            if request.num_in_flight:
                continue  # retracted: its tokens in flight come first
            fits = not budget.is_full and bool(self._free_slots) and budget.admit(request)
            if not fits and self._preempt(request, budget.missing_tokens(request, 0), admitted):
                budget = self._admission.budget(self.running, shared, reserved)
                fits = budget.admit(request)
            if not fits:
                break
            self._start(request)
            admitted.append(request)

    def _start(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.num_retractions:
            request.epoch += 1  # rows launched before it was retracted mean nothing to it now
        request.num_prefill = len(request.token_ids)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        if not request.num_retractions:
            request.num_cached_prompt = request.num_cached
        self._planner.place(request)
        self.running[request] = None

    def _prefill_rows(self, prefilling: Sequence[Request], num_decoding: int) -> Iterator[Row]:
        """Chunks in order of admission, within the step's tokens and the pages there are."""
        chunk = self._rules.limits.chunk_tokens
        left = 2**31 if chunk is None else max(chunk - num_decoding, 1)
        for request in prefilling:
            room = self.pages.room_for(request)
            tokens = min(left, room, request.num_prefill - request.num_scheduled)
            if tokens <= 0:
                return
            left -= tokens
            yield self._planner.prefill_row(request, tokens)

    def _preempt(self, candidate: Request, missing_tokens: int, spared: Sequence[Request]) -> bool:
        """Retracts running requests for a more important one; whether there were enough."""
        running = [r for r in self.running if r not in spared]
        chosen = self._rules.retraction.to_preempt(running, candidate, missing_tokens)
        for request in chosen:
            self._retract(request)
        return bool(chosen)

    def _retract(self, request: Request) -> None:
        """Takes pages and slot away; tokens in flight are still appended when they come."""
        self._leave(request, keep=self._rules.retraction.keeps_kv)
        request.restart()
        self.num_retracted += 1
        self.waiting.put_back(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """The end of every request."""
        request.finish_reason = reason
        if request.status is Status.RUNNING:
            self._leave(request, keep=reason.status_code is None)
        else:
            self.waiting.remove(request)
        if reason.type != "abort":
            self._estimator.finished(request)
        request.epoch += 1
        request.num_in_flight = 0
        request.status = Status.FINISHED

    def _leave(self, request: Request, keep: bool) -> None:
        """The one release path of finish, abort, failure, retraction and preemption."""
        del self.running[request]
        self.pages.release(request, keep)
        self._free_slots.append(request.slot)
        request.slot = -1


def _reason_to_stop(request: Request, token: int) -> FinishReason | None:
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
