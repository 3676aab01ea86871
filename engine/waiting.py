"""Requests that wait, in order of arrival; the policy's order is made when it is asked for.

Knows importance and limits; never pages or budgets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from treadle.engine.errors import QueueFull
from treadle.engine.policy import QueuePolicy
from treadle.engine.radix_cache import RadixCache
from treadle.engine.request import Request


class WaitingQueue:
    """New requests and retracted ones; a retracted one keeps its place by arrival."""

    def __init__(
        self, policy: QueuePolicy, max_requests: int | None, drops_less_important: bool
    ) -> None:
        """max_requests: that may wait; None: any number.
        drops_less_important: a full queue drops its least important request for a better one.
        """
        self._policy = policy
        self._max_requests = max_requests
        self._drops_less_important = drops_less_important
        self._requests: dict[Request, None] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def room_for(self, request: Request) -> Request | None:
        """The request to drop before this one can be put in; None when there is room.

        Raises: QueueFull.
        """
        if self._max_requests is None or len(self._requests) < self._max_requests:
            return None
        least = min(self._requests, key=lambda r: (r.importance, -r.arrival_order))
        mine = self._policy.importance(request)
        if not self._drops_less_important or least.importance >= mine:
            raise QueueFull(
                f"the request queue is full: {self._max_requests} requests wait already"
            )
        return least

    def put(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival_order = self._arrivals
        request.importance = self._policy.importance(request)
        self._requests[request] = None

    def put_back(self, request: Request) -> None:
        """A retracted request; it may exceed the limit."""
        self._requests[request] = None
        self._requests = dict.fromkeys(sorted(self._requests, key=lambda r: r.arrival_order))

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def use_cache(self, cache: RadixCache | None) -> None:
        """The tree was made anew."""
        if cache is not None:
            self._policy.use_cache(cache)

    def in_order(self, running: Collection[Request]) -> Sequence[Request]:
        """As the policy wants them admitted."""
        waiting = list(self._requests)
        return waiting if self._policy.is_arrival_order else self._policy.order(waiting, running)
