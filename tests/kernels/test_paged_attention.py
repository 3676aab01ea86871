"""Paged attention against one query at a time in fp64.

Every slot and page-table entry that no query may see is poisoned.
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

    def check(self, attention: Callable[..., Any]) -> None:
        q = self.arguments[0]
        out = attention(*self.arguments)
        assert out.dtype is q.dtype and out.shape == q.shape and out.is_contiguous()
        rtol, atol = TOLERANCE[q.dtype]
        torch.testing.assert_close(out.double(), self.want, rtol=rtol, atol=atol)


def make_case(shape: Shape, rows: list[tuple[int, int]]) -> Case:
    """rows: (q_len, seq_len) of each."""
    q_lens, seq_lens = [q for q, _ in rows], [s for _, s in rows]
    size = shape.page_size
    pages = -(-max(seq_lens) // size) + 2
    table = torch.randperm(len(rows) * pages).view(len(rows), pages).int()
    slots = (len(rows) * pages * size, shape.kv_heads, shape.dim)
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
    q = torch.randn(sum(q_lens), shape.q_heads, shape.dim).to(shape.dtype)
    cu_seqlens_q = torch.tensor([0, *q_lens]).cumsum(0).int()
    meta = AttentionMeta(
        cu_seqlens_q, torch.tensor(seq_lens).int(), table, size, max(q_lens), max(seq_lens)
    )
    scale = random.uniform(0.5, 2) * shape.dim**-0.5
    want = reference.paged_attention(
        q, k_cache, v_cache, q_lens, seq_lens, table, size, scale, shape.window
    )
    return Case((q, k_cache, v_cache, meta, scale, shape.window), want)


DECODE = [(1, 1), (1, 2), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 200)]
PREFILL = [(1, 1), (2, 2), (33, 33), (40, 129)]
MIXED = [(1, 70), (19, 19), (1, 1), (5, 130), (1, 33), (2, 90)]


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
    k_cache[int(meta.page_table[1, 1]) * 16 + 3] = float("nan")
    out = implementation(paged_attention, "paged_attention")(*case.arguments)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_attention_meta_refuses_wide_integers() -> None:
    wide = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(AssertionError):
        AttentionMeta(wide, wide[:1].int(), wide.view(1, 2).int(), 1, 1, 1)
