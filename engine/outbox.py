"""Requests with news, turned into deltas and handed to their sinks, oldest news first.

Knows how tokens become a delta, never how a step was planned or where a delta goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from treadle.engine.output import RequestOutput
from treadle.engine.request import Request

logger = logging.getLogger(__name__)


class Outbox:
    """Collects requests during `update`; `deliver` runs after the next step is launched."""

    def __init__(
        self, on_finish: Callable[[Request], None], on_error: Callable[[Request], None]
    ) -> None:
        """on_finish: called after a request's last delta. on_error: its sink raised."""
        self._on_finish = on_finish
        self._on_error = on_error
        self._requests: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._requests[request] = None

    def deliver(self, slice_s: float) -> None:
        """Delivers to at least one request, and to more until the slice of time is used up."""
        end = time.perf_counter() + slice_s
        for request in tuple(self._requests):
            del self._requests[request]
            self._deliver_one(request)
            if time.perf_counter() > end:
                return

    def _deliver_one(self, request: Request) -> None:
        is_finished = request.finish_reason is not None
        reported = request.num_reported
        waiting = len(request.token_ids) - request.prompt_len - reported
        if not is_finished and 0 < reported and waiting < request.stream_interval:
            return
        try:
            request.sink(_delta(request))
        except Exception:
            logger.exception("The receiver of request %s failed; aborting it", request.request_id)
            self._on_error(request)
        if is_finished:
            self._on_finish(request)


def _delta(request: Request) -> RequestOutput:
    new_ids = request.token_ids[request.prompt_len + request.num_reported :].tolist()
    request.num_reported += len(new_ids)
    return RequestOutput(  # by position: names double its cost, and one is made per token
        request.request_id,
        request.index,
        _text(request, new_ids),
        new_ids,
        request.prompt_len,
        request.num_reported,
        request.num_cached_prompt,
        request.finish_reason,
        request.num_retractions,
    )


def _text(request: Request, new_ids: list[int]) -> str:
    """The text of these tokens; a matched stop token adds none unless it is to be kept."""
    stream, reason = request.text, request.finish_reason
    if stream is None:
        return ""
    shown = new_ids
    if reason is not None and isinstance(reason.matched, int) and not request.params.no_stop_trim:
        shown = new_ids[:-1]
    if stream.has_stops:
        # every token but a stop token went through the matcher in `update`
        text, request.pending_text = request.pending_text, ""
        if len(shown) == len(new_ids) and reason is not None and isinstance(reason.matched, int):
            text += stream.push(new_ids[-1:])
    else:
        text = stream.push(shown)
    return text + stream.finish() if reason is not None else text
