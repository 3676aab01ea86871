from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.graphs.buckets import Buckets, GraphKey, decode_ladder, prefill_ladder

SIZES = st.lists(st.integers(1, 5000), unique=True, max_size=60).map(lambda s: tuple(sorted(s)))


def decode_rule(rows: int) -> bool:
    """Whether SGLang's list, without speculation, holds a size whatever the largest is."""
    if rows <= 12:
        return rows in (1, 2, 4, 8, 12)
    if rows <= 256:
        return rows % 8 == 0
    return rows % 16 == 0 if rows < 512 else rows % 32 == 0


def dense_rule(rows: int) -> bool:
    if rows <= 8:
        return True
    if rows <= 32:
        return rows % 2 == 0
    if rows <= 64:
        return rows % 4 == 0 and rows >= 40
    return rows % 8 == 0 if rows <= 256 else rows % 16 == 0


def prefill_rule(tokens: int) -> bool:
    for last, step in ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256)):
        if tokens <= last:
            return tokens % step == 0
    return tokens % 512 == 0


def test_decode_ladder_of_512_rows_is_the_one_that_sglang_logs() -> None:
    expected = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), 512]
    assert list(decode_ladder(512)) == expected and len(expected) == 52


@pytest.mark.parametrize(
    ("rows", "ladder"),
    [
        (0, ()),
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (48, (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)),
        (30, (1, 2, 4, 8, 12, 16, 24, 30)),
    ],
)
def test_decode_ladder_of_few_rows(rows: int, ladder: tuple[int, ...]) -> None:
    assert decode_ladder(rows) == ladder


def test_dense_ladder_of_300_rows_is_that_of_speculation() -> None:
    expected = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), 272, 288]
    assert list(decode_ladder(300, dense=True)) == [*expected, 300]


@given(st.integers(1, 3000))
def test_ladders_hold_what_the_rule_says_and_the_largest(limit: int) -> None:
    for rule, dense in ((decode_rule, False), (dense_rule, True)):
        expected = sorted({rows for rows in range(1, limit + 1) if rule(rows)} | {limit})
        assert list(decode_ladder(limit, dense=dense)) == expected
    assert decode_ladder(limit, padding=False) == tuple(range(1, limit + 1))


@given(st.integers(0, 20_000))
def test_prefill_ladder_holds_what_the_rule_says(limit: int) -> None:
    assert list(prefill_ladder(limit)) == [n for n in range(1, limit + 1) if prefill_rule(n)]


@pytest.mark.parametrize(("chunk", "sizes"), [(2048, 42), (4096, 50), (8192, 58), (16384, 74)])
def test_prefill_ladder_of_usual_chunks(chunk: int, sizes: int) -> None:
    assert len(prefill_ladder(chunk)) == sizes and prefill_ladder(chunk)[-1] == chunk


@given(SIZES, SIZES, st.integers(0, 6000))
def test_a_size_gets_the_smallest_bucket_that_covers_it(
    rows: tuple[int, ...], tokens: tuple[int, ...], size: int
) -> None:
    buckets = Buckets(rows, tokens)
    assert buckets.rows_for(size) == min((b for b in rows if b >= size), default=None)
    assert buckets.tokens_for(size) == min((b for b in tokens if b >= size), default=None)


@given(SIZES, st.integers(1, 5000))
def test_without_padding_a_decode_must_fit_exactly(rows: tuple[int, ...], size: int) -> None:
    buckets = Buckets(rows, rows, padding=False)
    assert buckets.rows_for(size) == (size if size in rows else None)
    assert buckets.tokens_for(size) == Buckets(rows, rows).tokens_for(size)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (GraphKey("decode", 8, 8), "decode bs=8"),
        (GraphKey("decode_split", 64, 64, "lora"), "decode_split bs=64 lora"),
        (GraphKey("prefill", 512, 16), "prefill tokens=512"),
        (GraphKey("sample", 4, 4), "sample bs=4"),
    ],
)
def test_keys_read_as_in_a_log(key: GraphKey, text: str) -> None:
    assert str(key) == text and {key: 1}[GraphKey(*key)] == 1
