"""Which waiting requests may start now: token budgets by SGLang's formulas.

Knows lengths, pages and estimates; never an order of the queue (`policy`) or a step's rows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from treadle.engine.estimator import Newcomer, OutputEstimator
from treadle.engine.kv_pages import KvPages
from treadle.engine.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """Per scheduling pass unless said otherwise. None: no limit."""

    max_running_requests: int
    chunk_tokens: int | None  # prompt tokens of a step; None: whole prompts
    max_prefill_tokens: int  # prompt tokens of a step, but for its first request
    prefill_max_requests: int | None


class Admission:
    """Stateless between passes but for the estimator, which others feed."""

    def __init__(self, limits: Limits, pages: KvPages, estimator: OutputEstimator) -> None:
        self._limits = limits
        self._pages = pages
        self._estimator = estimator

    def budget(self, running: Collection[Request], num_decoding: int, reserved: int) -> Budget:
        """Opens a pass.

        num_decoding: decode rows that share the step; they count against its prompt tokens.
        reserved: tokens that this step's decodes are about to take.
        """
        return Budget(self._limits, self._pages, self._estimator, running, num_decoding, reserved)


class Budget:
    """What is left in one scheduling pass.

    Two sums limit it. The near one is the tokens that this pass's prefills take now; the far one
    adds what prefills under way and running requests are expected to need later.
    """

    def __init__(
        self,
        limits: Limits,
        pages: KvPages,
        estimator: OutputEstimator,
        running: Collection[Request],
        num_decoding: int,
        reserved: int,
    ) -> None:
        self._limits = limits
        self._pages = pages
        self._estimator = estimator
        self._running = list(running)
        self._newcomers: list[Newcomer] = []
        self._near = reserved
        prefilling = [r for r in running if r.is_prefilling]
        self._prefill_tokens = limits.max_prefill_tokens
        chunk = limits.chunk_tokens
        self._chunk = None if chunk is None else max(chunk - num_decoding, 1)
        for request in prefilling:
            tokens = self._first_chunk(request.num_prefill - request.num_scheduled)
            self._near += self._whole(tokens)
            self._spend(tokens)

    @property
    def is_spent(self) -> bool:
        """Whether this step takes no further prompt tokens or requests, whoever asks."""
        most = self._limits.prefill_max_requests
        is_out = self._prefill_tokens <= 0 or (self._chunk is not None and self._chunk <= 0)
        return is_out or (most is not None and len(self._newcomers) >= most)

    @property
    def is_full(self) -> bool:
        """Whether as many requests run as may."""
        return len(self._running) + len(self._newcomers) >= self._limits.max_running_requests

    def missing_tokens(self, request: Request, num_cached: int) -> int:
        """How many tokens too few there are for the request; at most 0 when it fits."""
        page = self._pages.page_size
        near = self._near + self._whole(self._first_chunk(len(request.token_ids) - num_cached))
        newcomers = [*self._newcomers, (request, num_cached)]
        far = self._estimator.need(self._running, newcomers) + page * len(newcomers)
        return max(near + page, far) - self._pages.available_tokens + 1

    def admit(self, request: Request) -> bool:
        """Locks the request's prefix and takes its share of the budget, or changes nothing.

        Where nothing runs a request is taken in any case: alone it fits, or it would not have been
        let in.
        """
        is_alone = not self._running and not self._newcomers
        num_cached = self._pages.peek(request)
        if not is_alone and self.missing_tokens(request, num_cached) > 0:
            return False
        if self._chunk is None and self._newcomers:
            if self._whole(len(request.token_ids) - num_cached) >= self._prefill_tokens:
                return False
        self._pages.admit(request)
        # the lock may have taken tokens that were evictable before
        if not is_alone and self.missing_tokens(request, request.num_cached) > 0:
            self._pages.withdraw(request)
            return False
        tokens = self._first_chunk(len(request.token_ids) - request.num_cached)
        self._near += self._whole(tokens) + self._pages.page_size
        self._spend(tokens)
        self._newcomers.append((request, request.num_cached))
        return True

    def _spend(self, tokens: int) -> None:
        self._prefill_tokens -= self._whole(tokens)
        if self._chunk is not None:
            self._chunk -= tokens

    def _first_chunk(self, extend: int) -> int:
        return extend if self._chunk is None else min(extend, max(self._chunk, 0))

    def _whole(self, tokens: int) -> int:
        page = self._pages.page_size
        return -(-tokens // page) * page
