"""Rows of a step into a StepPlan: plain arrays for the device.

Knows requests' counts and slots; never which of them should run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle.engine.kv_pages import KvPages
from treadle.engine.request import Request, Status
from treadle.graphs.step import Int32s, Int64s, Mode, SamplingBatch, SlotInit, Step, StepPlan


class Row(NamedTuple):
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
    num_decode_rows: int
    num_running: int  # requests past their prompt, whether they decode in this step or not
    num_prefill_tokens: int
    num_new_requests: int
    num_cached_tokens: int  # prompt tokens of new requests that need no computing


class Planner:
    """Numbers the steps."""

    def __init__(self, pages: KvPages) -> None:
        self._pages = pages
        self._seq = 0
        self._placed: list[tuple[Request, int]] = []  # with their epochs, not yet in a plan

    def place(self, request: Request) -> None:
        """A request got its slot: the next plan sets the slot up and tells where its prefix is."""
        self._pages.place(request)
        self._placed.append((request, request.epoch))

    def decode_row(self, request: Request) -> Row:
        return self._row(request, 1, samples=True, from_host=False)

    def prefill_row(self, request: Request, q_len: int) -> Row:
        is_last = request.num_scheduled + q_len == request.num_prefill
        return self._row(request, q_len, samples=is_last, from_host=True)

    def plan(self, rows: Sequence[Row], num_running: int) -> Launch:
        """The step of these rows, decodes first."""
        seq = self._seq + 1
        placed, self._placed = self._placed, []
        admitted = [r for r, epoch in placed if r.epoch == epoch and r.status is Status.RUNNING]
        self._pages.last_step = seq
        num_decode = sum(not row.from_host for row in rows)
        plan = self._arrays(_mode(num_decode, len(rows)), rows, admitted)
        self._seq = seq  # only now: a number that is not launched would stop the executor for good
        return Launch(
            step=Step(seq, (plan,)),
            rows=tuple(rows),
            num_decode_rows=num_decode,
            num_running=num_running,
            num_prefill_tokens=sum(row.q_len for row in rows[num_decode:]),
            num_new_requests=len(admitted),
            num_cached_tokens=sum(request.num_cached for request in admitted),
        )

    def _row(self, request: Request, q_len: int, *, samples: bool, from_host: bool) -> Row:
        request.num_scheduled += q_len
        request.num_in_flight += samples
        self._pages.extend(request, request.num_scheduled)
        return Row(request, request.epoch, q_len, samples, from_host)

    def _arrays(self, mode: Mode, rows: Sequence[Row], admitted: Sequence[Request]) -> StepPlan:
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
            token_ids=_host_tokens(rows),
            page_updates=self._pages.tables.take(),
            slot_init=slot_init,
            sampling=SamplingBatch(
                np.array(temperature, dtype=np.float32),
                all_greedy=not any(temperature),
                banned=_banned(rows),
            ),
        )


def _banned(rows: Sequence[Row]) -> tuple[Int64s, Int64s] | None:
    """Tokens that would end a request before its min_new_tokens, by row."""
    pairs = [
        (place, token)
        for place, row in enumerate(rows)
        if row.samples and row.request.params.min_new_tokens
        # the token that this row draws is counted as in flight already
        if row.request.num_generated + row.request.num_in_flight
        <= row.request.params.min_new_tokens
        for token in row.request.stop_ids
    ]
    if not pairs:
        return None
    columns = np.array(pairs, dtype=np.int64)
    return columns[:, 0], columns[:, 1]


def _mode(num_decode: int, num_rows: int) -> Mode:
    if num_decode == num_rows:
        return "decode"
    return "mixed" if num_decode else "prefill"


def _int32(values: Iterable[int]) -> Int32s:
    return np.array(list(values), dtype=np.int32)


def _host_tokens(rows: Iterable[Row]) -> Int32s:
    """Tokens of the rows that bring theirs, one after the other."""
    pieces = []
    for row in rows:
        if row.from_host:
            end = row.request.num_scheduled
            pieces.append(np.array(row.request.token_ids[end - row.q_len : end], dtype=np.int32))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
