"""How many tokens running requests will still generate: what admission has to leave room for.

Knows lengths of requests, never pages, queues or a device.

Two ways: `NewTokenRatio` is SGLang's, a share of each request's max_new_tokens that decays with
every step and jumps after a retraction; `ObservedLengths` learns from what finished requests really
produced and keeps a margin for a while after a retraction.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Collection, Iterable
from typing import Protocol

from treadle.engine.request import Request

INIT_RATIO = 0.7  # SGLang's SGLANG_INIT_NEW_TOKEN_RATIO and its fellows, reference 0.5.23
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20


class OutputEstimator(Protocol):
    """Told of everything that bears on it; asked at every admission."""

    def remaining(self, requests: Iterable[Request]) -> float:
        """Tokens these requests are expected to generate from here on."""

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

    def remaining(self, requests: Iterable[Request]) -> float:
        return sum(
            min(r.num_left, self._clip) * (1.0 if r.params.ignore_eos else self.ratio)
            for r in requests
        )

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
    """Expects of a running request what finished ones produced that got at least as far.

    The mean of the longer ones, weighted by `conservativeness`, and after a retraction by a margin
    that fades. Until enough requests have finished, the share is SGLang's initial one.
    """

    WINDOW = 256  # finished requests remembered
    ENOUGH = 8  # finished requests that got as far, to trust their mean
    MARGIN = 0.5  # added at a retraction, to at most MAX_MARGIN
    MAX_MARGIN = 2.0
    FADE = 0.98  # of the margin that is left after a decode step

    def __init__(self, conservativeness: float, clip: int) -> None:
        self._conservativeness = conservativeness
        self._clip = clip
        self._sorted: list[int] = []
        self._recent: deque[int] = deque()
        self._margin = 0.0

    def remaining(self, requests: Iterable[Request]) -> float:
        factor = self._conservativeness * (1.0 + self._margin)
        lengths = self._sorted
        suffix_sums = _suffix_sums(lengths)
        total = 0.0
        for request in requests:
            left = min(request.num_left, self._clip)
            if request.params.ignore_eos:
                total += left
                continue
            generated = request.num_generated + request.num_in_flight
            place = bisect_right(lengths, generated)
            longer = len(lengths) - place
            if longer >= self.ENOUGH:
                expected = suffix_sums[place] / longer - generated
            else:
                expected = INIT_RATIO * left
            total += min(expected * factor, left)
        return total

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


def _suffix_sums(lengths: list[int]) -> list[int]:
    sums = [0] * (len(lengths) + 1)
    for place in range(len(lengths) - 1, -1, -1):
        sums[place] = sums[place + 1] + lengths[place]
    return sums
