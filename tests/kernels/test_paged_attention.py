"""Paged attention against one query at a time in fp64.

Every slot and page-table entry that no query may see is poisoned, and so is all about empty rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from treadle.kernels import paged_attention, reference
from treadle.kernels.paged_attention import AttentionMeta

Implementation = Callable[..., Callable[..., Any]]

# The arithmetic is fp32 throughout, the result is rounded once: half a unit in the last place.
TOLERANCE = {
    torch.float32: (1e-5, 5e-6),
    torch.bfloat16: (2**-8, 1e-5),
    torch.float16: (2**-11, 1e-5),
}
COMPILED = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Shape:
    q_heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    page_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Case:
    """Random rows, and the answer they must get."""

    arguments: tuple[Any, ...]
    want: torch.Tensor

    def check(self, attention: Callable[..., Any], out: torch.Tensor | None = None) -> None:
        q, tokens = self.arguments[0], len(self.want)
        got = attention(*self.arguments, out)
        assert out is None or got is out
        assert got.dtype is q.dtype and got.shape == q.shape and got.is_contiguous()
        rtol, atol = TOLERANCE[q.dtype]
        torch.testing.assert_close(got[:tokens].double(), self.want, rtol=rtol, atol=atol)
        assert got[tokens:].isnan().all()


def make_case(shape: Shape, rows: list[tuple[int, int]], padding: int = 0) -> Case:
    """rows: (q_len, seq_len) of each. padding: tokens after those of the rows."""
    q_lens, seq_lens = [q for q, _ in rows], [s for _, s in rows]
    size = shape.page_size
    pages = -(-max(seq_lens) // size) + 2
    places = len(rows) + random.randint(0, 3)  # rows of the page table
    req_slot = torch.randperm(places)[: len(rows)]
    all_pages = torch.randperm(places * (pages + 1)).view(places, pages + 1).int()
    table = all_pages[req_slot, :pages]
    slots = (places * (pages + 1) * size, shape.kv_heads, shape.dim)
    k_cache = torch.full(slots, float("nan"), dtype=shape.dtype)
    v_cache = k_cache.clone()
    for row, (q_len, seq_len) in enumerate(rows):
        first = max(0, seq_len - q_len - shape.window + 1) if shape.window else 0
        seen = torch.arange(first, seq_len)
        used = table[row, seen // size].long() * size + seen % size
        k_cache[used] = torch.randn(len(seen), *slots[1:]).to(shape.dtype)
        v_cache[used] = torch.randn(len(seen), *slots[1:]).to(shape.dtype)
        table[row, : first // size] = random.choice([-(2**31), 2**31 - 1])
        table[row, -(-seq_len // size) :] = random.choice([-(2**31), 2**31 - 1])
    q = torch.randn(sum(q_lens) + padding, shape.q_heads, shape.dim).to(shape.dtype)
    is_empty = torch.tensor(q_lens) == 0
    meta = AttentionMeta(
        torch.tensor([0, *q_lens]).cumsum(0).int(),
        torch.tensor(seq_lens).int().masked_fill(is_empty, random.choice([-(2**31), 2**31 - 1])),
        req_slot.masked_fill(is_empty, random.choice([-(2**62), 2**62])),
        all_pages.index_copy(0, req_slot, torch.cat([table, table[:, :1]], 1))[:, :pages],
        size,
        max_q_len=1 if max(q_lens) == 1 else random.choice([max(q_lens), 1 << 30]),
        max_seq_len=random.choice([max(seq_lens), 1 << 30]),
    )
    scale = random.uniform(0.5, 2) * shape.dim**-0.5
    want = reference.paged_attention(
        q[: sum(q_lens)], k_cache, v_cache, q_lens, seq_lens, table, size, scale, shape.window
    )
    return Case((q, k_cache, v_cache, meta, scale, shape.window), want)


DECODE = [(1, 1), (1, 2), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 200)]
PREFILL = [(1, 1), (2, 2), (33, 33), (40, 129)]
MIXED = [(1, 70), (19, 19), (1, 1), (5, 130), (1, 33), (2, 90)]


EMPTY = [
    [(0, 9), (1, 70), (1, 3)],
    [(1, 70), (0, 1), (0, 90), (1, 3)],
    [(1, 70), (1, 3), (0, 5)],
    [(0, 1), (19, 30), (0, 0), (1, 40), (0, 7), (5, 5), (0, 2)],
]


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_attention_rows_pages_windows(
    implementation: Implementation,
    dtype: torch.dtype,
    page_size: int,
    window: int | None,
    rows: list[tuple[int, int]],
) -> None:
    shape = Shape(page_size=page_size, window=window, dtype=dtype)
    make_case(shape, rows).check(implementation(paged_attention, "paged_attention"))


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"),
    [(1, 1, 32), (4, 4, 64), (5, 1, 80), (7, 1, 128), (14, 2, 256), (130, 1, 32)],
)
def test_attention_head_shapes(
    implementation: Implementation, dtype: torch.dtype, q_heads: int, kv_heads: int, dim: int
) -> None:
    shape = Shape(q_heads=q_heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    make_case(shape, MIXED).check(implementation(paged_attention, "paged_attention"))


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("rows", [[(1, 3001)], [(1, 1537), (3, 1024)], [(1, 2), (1, 4000)]])
def test_attention_long_context_in_parts(
    implementation: Implementation,
    dtype: torch.dtype,
    window: int | None,
    rows: list[tuple[int, int]],
) -> None:
    shape = Shape(q_heads=4, kv_heads=1, window=window, dtype=dtype)
    make_case(shape, rows).check(implementation(paged_attention, "paged_attention"))


@pytest.mark.parametrize("rows", range(6))
def test_attention_random_batches(implementation: Implementation, rows: int) -> None:
    shape = Shape(
        q_heads=(kv_heads := random.choice([1, 2, 3])) * random.randint(1, 8),
        kv_heads=kv_heads,
        dim=random.choice([16, 48, 64, 96]),
        page_size=random.choice([1, 2, 5, 16, 32]),
        window=random.choice([None, random.randint(1, 200)]),
        dtype=random.choice(COMPILED),
    )
    lengths = [
        (q_len := random.choice([1, 1, random.randint(2, 50)]), q_len + random.randint(0, 150))
        for _ in range(2 * rows + 1)
    ]
    make_case(shape, lengths).check(implementation(paged_attention, "paged_attention"))


@pytest.mark.parametrize("shape", [Shape(dtype=torch.float16), Shape(dim=20), Shape(dim=272)])
def test_attention_falls_back_where_nothing_is_compiled(shape: Shape) -> None:
    make_case(shape, MIXED).check(paged_attention.paged_attention)


@pytest.mark.parametrize("dtype", COMPILED)
def test_attention_takes_strided_queries(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    case = make_case(Shape(dtype=dtype), MIXED)
    q, *rest = case.arguments
    fused = torch.randn(len(q), 15, 64).to(dtype)
    fused[:, 2:11] = q
    strided = Case((fused[:, 2:11], *rest), case.want)
    strided.check(implementation(paged_attention, "paged_attention"))


@pytest.mark.parametrize("padding", [0, 1, 9])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rows", EMPTY, ids=["first", "middle", "last", "everywhere"])
def test_attention_empty_rows_and_padded_tokens(
    implementation: Implementation, rows: list[tuple[int, int]], window: int | None, padding: int
) -> None:
    case = make_case(Shape(window=window), rows, padding)
    case.check(implementation(paged_attention, "paged_attention"))


@pytest.mark.parametrize("max_q_len", [1, 2])
def test_attention_batch_of_empty_rows_writes_nothing(
    implementation: Implementation, max_q_len: int
) -> None:
    q, cache = torch.randn(5, 4, 32), torch.full((2, 16, 2, 32), float("nan"))
    zeros = torch.zeros(4).int()
    meta = AttentionMeta(
        zeros, zeros[1:] - 1, zeros[1:].long() + 2**62, zeros.view(2, 2), 16, max_q_len, 1 << 30
    )
    out = torch.randn(q.shape)
    before = out.clone()
    implementation(paged_attention, "paged_attention")(q, *cache, meta, 1.0, None, out)
    assert torch.equal(out, before)


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_writes_into_a_given_output(
    implementation: Implementation, dtype: torch.dtype, rows: list[tuple[int, int]]
) -> None:
    case = make_case(Shape(dtype=dtype), rows, padding=3)
    buffer = torch.full((len(case.want) + 8, 9, 64), float("nan"), dtype=dtype)
    case.check(implementation(paged_attention, "paged_attention"), buffer[2:-3])
    assert buffer[:2].isnan().all() and buffer[-3:].isnan().all()


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("is_given", [False, True])
def test_attention_replays_with_other_lengths(
    played: Callable[..., Any], dtype: torch.dtype, is_given: bool
) -> None:
    shape = Shape(dtype=dtype, page_size=4)
    q, *rest = make_case(shape, [(1, 1), (0, 7), (9, 11)], padding=4).arguments
    q = torch.cat([q, q], 1)[:, 1:10]  # strided
    k_cache, v_cache, meta, scale, window = rest
    out = torch.full(q.shape, float("nan"), dtype=dtype) if is_given else None

    def change() -> None:
        q.copy_(torch.randn(q.shape))
        for cache in (k_cache, v_cache):
            cache.copy_(torch.randn(cache.shape))
        meta.cu_seqlens_q.copy_(torch.tensor([0, 5, 6, 6]))
        meta.seq_lens.copy_(torch.tensor([8, 10, 2**31 - 1]))
        meta.req_slot.copy_(torch.tensor([2, 0, -1]))
        meta.page_table.random_(len(k_cache) // 4)

    def attend() -> torch.Tensor:
        return paged_attention.paged_attention(q, k_cache, v_cache, meta, scale, window, out)

    got = played(attend, change)
    assert out is None or got is out
    want = paged_attention.paged_attention(q, k_cache, v_cache, meta, scale, window)
    assert torch.equal(got[:6], want[:6]) and got[6:].isnan().all()


@pytest.mark.parametrize("block", [1, 37, 1000])
def test_attention_torch_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(paged_attention, "_BLOCK_SCORES", block)
    for window in (None, 5):
        make_case(Shape(window=window), MIXED).check(paged_attention.paged_attention_torch)


def test_attention_survives_large_scores(implementation: Implementation) -> None:
    case = make_case(Shape(), MIXED)
    q, k_cache, v_cache, meta, scale, window = case.arguments
    attention = implementation(paged_attention, "paged_attention")
    out = attention(q * 1e4, k_cache, v_cache, meta, scale, window)
    assert out.isfinite().all()
    assert (out.abs() <= v_cache[v_cache.isfinite()].abs().max()).all()


def test_attention_bad_number_in_a_key_shows(implementation: Implementation) -> None:
    case = make_case(Shape(), [(1, 40), (1, 40)])
    _, k_cache, _, meta, _, _ = case.arguments
    k_cache[int(meta.page_table[meta.req_slot[1], 1]) * 16 + 3] = float("nan")
    out = implementation(paged_attention, "paged_attention")(*case.arguments)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_attention_meta_refuses_wide_integers() -> None:
    wide = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(AssertionError):
        AttentionMeta(wide, wide[:1].int(), wide[:1], wide.view(1, 2).int(), 1, 1, 1)
    with pytest.raises(AssertionError):
        AttentionMeta(wide.int(), wide[:1].int(), wide[:1].int(), wide.view(1, 2).int(), 1, 1, 1)
