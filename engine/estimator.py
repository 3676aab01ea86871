"""How many more tokens running requests will need: what admission has to leave room for.

Knows lengths of requests, never pages, queues or a device.

Two ways. `NewTokenRatio` is SGLang's: the sum of what each request may still generate, times a
ratio that decays with every step and jumps after a retraction. `ObservedLengths` plays the future:
it draws each request's end from what finished requests really produced and finds the moment when
the requests that are still there need most (the idea of LightLLM's Past-Future scheduler, Gong et
al., ASPLOS 2025).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from treadle.engine.request import Request

INIT_RATIO = 0.7  # SGLang's SGLANG_INIT_NEW_TOKEN_RATIO and its fellows, reference 0.5.23
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly however many there are

Newcomer = tuple[Request, int]
"""A request that is about to be admitted, and how many of its tokens are cached."""


class OutputEstimator(Protocol):
    """Told of everything that bears on it; asked at every admission."""

    def need(self, running: Collection[Request], newcomers: Sequence[Newcomer]) -> int:
        """Tokens beyond what is held now that all these are expected to need at once."""

    def step(self) -> None:
        """A decode step ran without a retraction."""

    def finished(self, request: Request) -> None: ...

    def retracted(self, survivors: Collection[Request]) -> tuple[float, float]:
        """Requests were retracted; returns the ratio before and after, for the log."""

    def idle(self) -> None:
        """Nothing runs and nothing waits."""


class NewTokenRatio:
    """SGLang's estimate: ratio x what a request may still generate, clipped."""

    def __init__(self, conservativeness: float, clip: int) -> None:
        self._clip = clip
        self._init = min(INIT_RATIO * conservativeness, 1.0)
        self._min = min(self._init * MIN_RATIO_FACTOR, 1.0)
        self._decay = (self._init - self._min) / DECAY_STEPS
        self.ratio = self._init

    def need(self, running: Collection[Request], newcomers: Sequence[Newcomer]) -> int:
        """A newcomer counts with all it may generate."""
        total = 0.0
        for request in running:
            left = min(request.num_left, self._clip)
            total += left if request.params.ignore_eos else left * self.ratio
            total += request.num_prefill - request.num_scheduled if request.is_prefilling else 0
        for request, num_cached in newcomers:
            total += len(request.token_ids) - num_cached + min(request.num_left, self._clip)
        return int(total)

    def step(self) -> None:
        self.ratio = max(self.ratio - self._decay, self._min)

    def finished(self, request: Request) -> None:
        pass

    def retracted(self, survivors: Collection[Request]) -> tuple[float, float]:
        before = self.ratio
        generated = sum(r.num_generated for r in survivors) + RETRACT_STEPS * len(survivors)
        allowed = sum(r.max_len - r.prompt_len for r in survivors)
        self.ratio = min(1.0, generated / (allowed + 1))
        return before, self.ratio

    def idle(self) -> None:
        self.ratio = self._init


class ObservedLengths:
    """Draws ends from finished requests, and the longest of them where none got as far.

    Until enough have finished, a request is expected to use SGLang's initial share. Expected
    lengths are scaled by `conservativeness`, and after a retraction by a margin that fades.
    """

    WINDOW = 256  # finished requests remembered
    ENOUGH = 16  # finished requests before they are believed
    # chosen on three mixes of `perf/retraction_bench.py`: few retractions at little loss of use
    MARGIN = 1.0  # added at a retraction, up to MAX_MARGIN
    MAX_MARGIN = 2.0
    FADE = 0.995  # of the margin that is left after a decode step

    def __init__(self, conservativeness: float, clip: int) -> None:
        self._conservativeness = conservativeness
        self._clip = clip
        self._sorted: list[int] = []
        self._recent: deque[int] = deque()
        self._margin = 0.0

    def need(self, running: Collection[Request], newcomers: Sequence[Newcomer]) -> int:
        """The peak over time, with each request's own pages going back when it ends."""
        ends: list[tuple[float, int]] = []  # steps until a request ends, its own tokens until then
        held = 0
        for request in running:
            shared, generated = request.num_shared, request.num_generated + request.num_in_flight
            known = max(request.num_scheduled, request.num_prefill)
            ends.append((self._steps_left(request, generated), known - shared))
            held += request.num_scheduled - shared
        for request, num_cached in newcomers:
            steps = self._steps_left(request, request.num_generated)
            ends.append((steps, len(request.token_ids) - num_cached))
        ends.sort(reverse=True)
        peak, own = 0.0, 0
        for count, (steps, tokens) in enumerate(ends, start=1):
            own += tokens  # of all requests that are still there when this one ends
            peak = max(peak, own + count * steps)
        return int(peak) - held

    def _steps_left(self, request: Request, generated: int) -> float:
        left = min(request.num_left, self._clip)
        if request.params.ignore_eos:
            return left
        factor = self._conservativeness * (1.0 + self._margin)
        lengths = self._sorted
        if len(lengths) < self.ENOUGH:
            return min(INIT_RATIO * left * factor, left)
        place = bisect_right(lengths, generated)
        longer = len(lengths) - place
        if not longer:
            return min(INIT_RATIO * left * factor, left)
        # evenly spread over requests, and the same for one request as long as it runs
        drawn = lengths[place + int(request.arrival_order * GOLDEN % 1.0 * longer)]
        return min((drawn - generated) * factor, left)

    def step(self) -> None:
        self._margin *= self.FADE

    def finished(self, request: Request) -> None:
        if request.params.ignore_eos:
            return  # its length was the client's choice
        if len(self._recent) == self.WINDOW:
            oldest = self._recent.popleft()
            self._sorted.pop(bisect_right(self._sorted, oldest) - 1)
        self._recent.append(request.num_generated)
        insort(self._sorted, request.num_generated)

    def retracted(self, survivors: Collection[Request]) -> tuple[float, float]:
        before = self._margin
        self._margin = min(self._margin + self.MARGIN, self.MAX_MARGIN)
        return 1.0 + before, 1.0 + self._margin

    def idle(self) -> None:
        self._margin = 0.0
