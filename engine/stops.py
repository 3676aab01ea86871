"""Finds stop strings in streamed text, whatever the chunks. Knows no tokens.

All stops are matched at once by an Aho-Corasick automaton (Aho & Corasick 1975), whose states are
made only as the text reaches them: a request with huge stops costs nothing until it comes close.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class _State:
    """The longest suffix of the text that is a prefix of some stop."""

    __slots__ = ("children", "depth", "fallback", "match", "stops")

    def __init__(self, depth: int, stops: list[str], fallback: _State | None) -> None:
        self.depth = depth  # characters in that suffix
        self.stops = stops  # those that begin with it
        self.fallback = fallback  # the next shorter such suffix; None for the empty one
        self.children: dict[str, _State] = {}
        complete = next((stop for stop in stops if len(stop) == depth), None)
        self.match: str | None = complete or (fallback.match if fallback else None)

    def child(self, char: str) -> _State | None:
        """The state one character deeper, if some stop goes on like that."""
        found = self.children.get(char)
        if found is None:
            stops = [stop for stop in self.stops if stop.startswith(char, self.depth)]
            if stops:
                below = self if self.fallback is None else self.fallback.next(char)
                found = self.children[char] = _State(self.depth + 1, stops, below)
        return found

    def next(self, char: str) -> _State:
        state: _State = self
        while True:
            child = state.child(char)
            if child is not None:
                return child
            if state.fallback is None:
                return state
            state = state.fallback


class StopMatcher:
    """Passes text on until a stop string is complete. Any chunking of the text gives the same.

    The stop that completes first wins, which is what a reader of single characters would see; of
    several that complete together, the longest. Held back is only a suffix that could become one.

    stops: non-empty strings.
    keep_match: the matched string itself stays in the text.
    """

    def __init__(self, stops: Sequence[str], keep_match: bool = False) -> None:
        self._root = self._state = _State(0, list(stops), None)
        self._keep_match = keep_match
        self._held = ""
        self._matched: str | None = None
        firsts = "".join({stop[0] for stop in stops})
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)").search

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may go out now, and the stop that ended it. After a match: nothing more."""
        if self._matched is not None:
            return "", self._matched
        root, state = self._root, self._state
        position = 0
        while position < len(text):
            if state is root:
                hit = self._first(text, position)
                if hit is None:
                    break
                position = hit.start()
            state = state.next(text[position])
            position += 1
            if state.match is not None:
                return self._end(text[:position], state.match)
        self._state = state
        seen = self._held + text
        passed = len(seen) - state.depth
        self._held = seen[passed:]
        return seen[:passed], None

    def finish(self) -> str:
        """The end of the text has come: what was held back goes out."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _end(self, text: str, stop: str) -> tuple[str, str]:
        seen = self._held + text
        self._held, self._matched = "", stop
        return (seen if self._keep_match else seen[: len(seen) - len(stop)]), stop
