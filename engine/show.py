"""A caller's value as text short enough for an error message. Knows no field and no transport."""

from __future__ import annotations

import reprlib

MAX_SHOWN = 200  # characters

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = _shortener.maxlong = 60
_shortener.maxlist = _shortener.maxtuple = _shortener.maxdict = 4


def show(value: object) -> str:
    """Reads no more of a large value than it prints."""
    text = _shortener.repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
