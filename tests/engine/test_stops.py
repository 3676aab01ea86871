"""Stop strings: the first to complete wins, nothing is held that need not be, any chunking."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.engine.stops import StopMatcher

TEXT = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=6)


def reference(text: str, stops: list[str]) -> tuple[int, str | None]:
    """Where the text ends and what ended it, by reading one character after the other."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return len(text), None


def run(chunks: list[str], stops: list[str], keep_match: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, keep_match)
    out, matched = "", None
    for chunk in chunks:
        passed, matched = matcher.push(chunk)
        out += passed
    return out + matcher.finish(), matched


@settings(deadline=None)
@given(TEXT, STOPS, st.booleans(), st.data())
def test_any_chunking_gives_what_a_reader_of_characters_sees(
    text: str, stops: list[str], keep_match: bool, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    edges = [0, *cuts, len(text)]
    chunks = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    end, expected = reference(text, stops)
    length = end if keep_match or expected is None else end - len(expected)
    assert run(chunks, stops, keep_match) == (text[:length], expected)


@settings(deadline=None)
@given(TEXT, STOPS)
def test_only_a_beginning_of_a_stop_is_held(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for count, char in enumerate(text, 1):
        passed, matched = matcher.push(char)
        out += passed
        if matched is not None:
            return
        seen = text[:count]
        held = max(
            (k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0
        )
        assert out == seen[: count - held]


def test_longest_wins_among_stops_that_complete_together() -> None:
    assert run(["xab"], ["b", "ab"], keep_match=False) == ("x", "ab")


def test_first_to_complete_wins_over_an_earlier_start() -> None:
    assert run(["x<|end|>y"], ["<|end|>y", "end"], keep_match=False) == ("x<|", "end")


def test_nothing_comes_out_after_a_match() -> None:
    matcher = StopMatcher(["stop"], keep_match=True)
    assert matcher.push("go st") == ("go ", None)
    assert matcher.push("op and more") == ("stop", "stop")
    assert matcher.push("more") == ("", "stop")
    assert matcher.finish() == ""


@pytest.mark.parametrize("stop", ["[", "^", "\\", "-]", ".*", "é", "\n\n", "&&", "😀"])
def test_any_character_is_taken_literally(stop: str) -> None:
    assert run(["before", stop, "after"], [stop], keep_match=False) == ("before", stop)
    assert run(["before, after"], [stop], keep_match=False) == ("before, after", None)


def test_huge_stops_on_text_that_almost_matches_stay_exact() -> None:
    size = 4000
    stops = ["a" * size + chr(ord("b") + i) for i in range(20)]
    assert run(["a" * 1000] * 7 + ["d!"], stops, keep_match=False) == ("a" * 3000, stops[2])
    text = ("a" * (size - 1) + "x") * 5
    assert run([text], stops, keep_match=False) == (text, None)
