"""Where time goes, by part: every moment belongs to exactly one, so the parts add up.

Wraps functions from outside, so that the product carries no timers. Knows nothing of what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """While an inner part runs, the outer one stands still."""

    def __init__(self, rest: str) -> None:
        """rest: the part that time outside every wrapped function belongs to."""
        self._part = rest
        self._started = self._since = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def restart(self) -> None:
        """Forgets what was measured."""
        self.switch(self._part)
        self._started = self._since
        self._seconds.clear()

    @property
    def elapsed(self) -> float:
        """Seconds between the last start and the last switch or reading."""
        return self._since - self._started

    def read(self) -> dict[str, float]:
        """Seconds since the last start, by part."""
        self.switch(self._part)
        return dict(self._seconds)

    def switch(self, part: str) -> str:
        """From now on time belongs to this part; returns the one that it belonged to."""
        now = time.perf_counter()
        before = self._part
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._part, self._since = part, now
        return before

    def wrap(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            before = self.switch(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.switch(before)

        return timed

    def wrap_async(
        self, part: str, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R]]:
        """What else the event loop does while the coroutine waits belongs to the part too."""

        async def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            before = self.switch(part)
            try:
                return await function(*args, **kwargs)
            finally:
                self.switch(before)

        return timed

    def attach(self, part: str, owner: object, name: str) -> None:
        """Wraps an attribute that is a function."""
        setattr(owner, name, self.wrap(part, getattr(owner, name)))
