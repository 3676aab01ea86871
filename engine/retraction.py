"""Who gives up its pages when they run out, and who makes way for a more important request.

Knows lengths, ages and importance, and how many pages are missing; never a queue or a step's rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from treadle.engine.estimator import OutputEstimator
from treadle.engine.kv_pages import KvPages
from treadle.engine.request import Request, Status

logger = logging.getLogger("treadle")

MAX_RETRACTIONS = 3  # beyond it a request is chosen only when no other is left


@dataclass(frozen=True, slots=True)
class RetractionRules:
    """order: sglang or observed, see `victims`. threshold: by how much importance must differ."""

    order: Literal["sglang", "observed"]
    by_priority: bool
    preempts: bool
    threshold: int

    @property
    def keeps_kv(self) -> bool:
        """Whether a retracted request's pages stay findable until somebody needs them."""
        return self.order == "observed"

    def victims(self, running: Collection[Request]) -> list[Request]:
        """Requests that may be retracted, the best choice first; at least one is never among them.

        sglang: fewest generated tokens, then the longest prompt.
        observed: the least computed work lost, then the newest; never the oldest.
        by_priority: the least important first, whatever the rest says.
        """
        if not running:
            return []
        ranks = {r: r.importance if self.by_priority else 0 for r in running}
        if self.order == "sglang":
            key = {r: (rank, r.num_generated, -r.prompt_len) for r, rank in ranks.items()}
            return sorted(running, key=key.__getitem__)[:-1]
        oldest = min(running, key=lambda r: (-ranks[r], r.arrival_order))
        return sorted((r for r in running if r is not oldest), key=lambda r: _loss(r, ranks[r]))

    def to_preempt(
        self, running: Collection[Request], candidate: Request, missing_tokens: int
    ) -> list[Request]:
        """The requests to preempt for a more important one: enough of them, or none.

        missing_tokens: what the candidate lacks; at most 0 when it only lacks a slot.
        """
        if not self.preempts:
            return []
        rank = candidate.importance
        less = [r for r in running if rank - r.importance > self.threshold]
        less.sort(key=lambda r: (r.importance, -r.arrival_order))
        chosen: list[Request] = []
        for request in less:
            chosen.append(request)
            missing_tokens -= request.num_scheduled - request.num_shared + request.num_left
            if missing_tokens <= 0:
                return chosen
        return []


def _loss(request: Request, rank: int) -> tuple[int, bool, int, int]:
    is_spared = request.num_retractions >= MAX_RETRACTIONS
    return rank, is_spared, request.num_computed - request.num_cached, -request.arrival_order


class Pressure:
    """Makes room when a step's decodes need more pages than there are."""

    def __init__(
        self,
        rules: RetractionRules,
        pages: KvPages,
        estimator: OutputEstimator,
        retract: Callable[[Request], None],
    ) -> None:
        """retract: takes a running request's pages and slot away."""
        self._rules = rules
        self._pages = pages
        self._estimator = estimator
        self._retract = retract

    def make_room(
        self, decoding: Collection[Request], running: Collection[Request], is_in_flight: bool
    ) -> int | None:
        """Sees to it that every decode row gets its page; None: wait for a result first.

        Returns the tokens that the rows are about to take.
        """
        most = self._pages.page_size * len(decoding) * len(self._pages.pools)
        if most <= self._pages.available_tokens:
            return most  # a row takes one page of each group at most
        need = self._need(decoding)
        if need <= self._pages.available_tokens:
            return need
        if is_in_flight and any(not r.may_sample for r in running):
            return None  # a request is about to end and to give its pages back
        retracted = []
        for victim in self._rules.victims(running):
            self._retract(victim)
            retracted.append(victim)
            need = self._need([r for r in decoding if r.status is Status.RUNNING])
            if need <= self._pages.available_tokens:
                break
        self._report(retracted, running)
        return need

    def unblock(self, running: Collection[Request]) -> bool:
        """Nothing could be planned and nothing is in flight: the best victim makes room, if any."""
        chosen = self._rules.victims(running)[:1]
        for victim in chosen:
            self._retract(victim)
        self._report(chosen, running)
        return bool(chosen)

    def _need(self, decoding: Iterable[Request]) -> int:
        missing = sum(self._pages.missing(r, r.num_scheduled + 1) for r in decoding)
        return self._pages.page_size * missing

    def _report(self, retracted: Collection[Request], survivors: Collection[Request]) -> None:
        if retracted:
            before, after = self._estimator.retracted(survivors)
            logger.warning(
                "KV cache pool is full. Retract requests. #retracted_reqs: %d, "
                "#new_tokens_gained: %d, #new_token_ratio: %.4f -> %.4f",
                len(retracted), self._pages.available_tokens, before, after,
            )  # fmt: skip
