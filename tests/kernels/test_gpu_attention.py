"""Triton's paged attention against one query at a time in fp64.

Every slot and page-table entry that no query may see is poisoned, and so is all about empty rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from treadle.kernels import reference_sampling
from treadle.kernels.paged_attention import AttentionMeta

pytest.importorskip("triton")

from treadle.kernels.gpu import decode_attention, paged_attention  # noqa: E402

# Weights are rounded to the cache's dtype before they meet the values, and the result once more.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
DECODE = [(1, 1), (1, 16), (1, 17), (1, 65), (1, 200)]
PREFILL = [(2, 2), (33, 33), (20, 129)]
MIXED = [(1, 70), (19, 19), (1, 1), (5, 130), (2, 90)]


@dataclass(frozen=True)
class Shape:
    q_heads: int = 6
    kv_heads: int = 2
    dim: int = 32
    page_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    sinks: bool = False
    softcap: float | None = None


@dataclass(frozen=True)
class Case:
    arguments: tuple[Any, ...]
    want: torch.Tensor

    def check(self, got: torch.Tensor) -> None:
        q, tokens = self.arguments[0], len(self.want)
        assert got.dtype is q.dtype and got.shape == q.shape and got.is_contiguous()
        bound = TOLERANCE[q.dtype]
        torch.testing.assert_close(got[:tokens].cpu().double(), self.want, rtol=bound, atol=bound)
        assert got[tokens:].isnan().all()


def make_case(
    device: torch.device, shape: Shape, rows: list[tuple[int, int]], padding: int = 0
) -> Case:
    """rows: (q_len, seq_len) of each. padding: tokens after those of the rows."""
    q_lens, seq_lens = [q for q, _ in rows], [s for _, s in rows]
    size = shape.page_size
    pages = -(-max(seq_lens) // size) + 2
    places = len(rows) + random.randint(0, 3)  # rows of the page table
    req_slot = torch.randperm(places)[: len(rows)]
    all_pages = torch.randperm(places * (pages + 1)).view(places, pages + 1).int()
    table = all_pages[req_slot, :pages]
    slots = (places * (pages + 1) * size, shape.kv_heads, shape.dim)
    k_cache = torch.full(slots, float("nan"), dtype=shape.cache_dtype or shape.dtype)
    v_cache = k_cache.clone()
    for row, (q_len, seq_len) in enumerate(rows):
        first = max(0, seq_len - q_len - shape.window + 1) if shape.window else 0
        seen = torch.arange(first, seq_len)
        used = table[row, seen // size].long() * size + seen % size
        k_cache[used] = torch.randn(len(seen), *slots[1:]).to(k_cache.dtype)
        v_cache[used] = torch.randn(len(seen), *slots[1:]).to(k_cache.dtype)
        table[row, : first // size] = random.choice([-(2**31), 2**31 - 1])
        table[row, -(-seq_len // size) :] = random.choice([-(2**31), 2**31 - 1])
    tokens = sum(q_lens) + padding
    fused = torch.randn(tokens, shape.q_heads + 2, shape.dim).to(shape.dtype).to(device)
    q = fused[:, 1:-1]
    is_empty = torch.tensor(q_lens) == 0
    meta = AttentionMeta(
        torch.tensor([0, *q_lens]).cumsum(0).int().to(device),
        torch.tensor(seq_lens).int().masked_fill(is_empty, 2**31 - 1).to(device),
        req_slot.masked_fill(is_empty, 2**62).to(device),
        all_pages.index_copy(0, req_slot, torch.cat([table, table[:, :1]], 1))[:, :pages].to(
            device
        ),
        size,
        max(q_lens),
        max(seq_lens) + random.randint(0, 99),
    )
    scale = random.uniform(0.5, 2) * shape.dim**-0.5
    sinks = torch.randn(shape.q_heads) * 2 if shape.sinks else None
    want = reference_sampling.paged_attention(
        q[: sum(q_lens)].cpu(), k_cache, v_cache, q_lens, seq_lens, table, size, scale,
        shape.window, sinks, shape.softcap,
    )  # fmt: skip
    on_device = None if sinks is None else sinks.to(device)
    arguments = (
        q, k_cache.to(device), v_cache.to(device), meta, scale, shape.window, None, on_device,
        shape.softcap,
    )  # fmt: skip
    return Case(arguments, want)


def check(device: torch.device, shape: Shape, rows: list[tuple[int, int]]) -> None:
    case = make_case(device, shape, rows)
    case.check(paged_attention.paged_attention(*case.arguments))


@pytest.mark.parametrize("page_size", [1, 3, 256])
@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("rows", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_attention_rows_pages_windows(
    gpu_device: torch.device, page_size: int, window: int | None, rows: list[tuple[int, int]]
) -> None:
    check(gpu_device, Shape(page_size=page_size, window=window), rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "rows", [[(1, 130)], [(40, 99)], MIXED], ids=["decode", "prefill", "mixed"]
)
def test_attention_dtypes(
    gpu_device: torch.device, dtype: torch.dtype, rows: list[tuple[int, int]]
) -> None:
    check(gpu_device, Shape(dtype=dtype, dim=64), rows)


@pytest.mark.parametrize("cache_dtype", TOLERANCE)
def test_attention_cache_of_another_dtype(
    gpu_device: torch.device, cache_dtype: torch.dtype
) -> None:
    check(gpu_device, Shape(dtype=torch.bfloat16, cache_dtype=cache_dtype), MIXED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"),
    [(1, 1, 32), (3, 1, 80), (5, 1, 96), (8, 1, 128), (10, 2, 256), (34, 1, 32), (4, 4, 20)],
)
def test_attention_head_shapes(
    gpu_device: torch.device, dtype: torch.dtype, q_heads: int, kv_heads: int, dim: int
) -> None:
    shape = Shape(q_heads=q_heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    check(gpu_device, shape, [(1, 40), (9, 50)])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_sinks_and_soft_caps(
    gpu_device: torch.device, sinks: bool, softcap: float | None, window: int | None
) -> None:
    check(gpu_device, Shape(sinks=sinks, softcap=softcap, window=window), MIXED)


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 150])
def test_attention_any_number_of_splits(
    gpu_device: torch.device, splits: int, sinks: bool, window: int | None
) -> None:
    case = make_case(gpu_device, Shape(sinks=sinks, window=window), [(1, 300), (1, 2), (1, 129)])
    out = torch.empty(case.arguments[0].shape, device=gpu_device)
    q, k_cache, v_cache, meta, scale, window, _, *extras = case.arguments
    attend: Callable[..., None] = decode_attention.decode_attention
    attend(q, k_cache, v_cache, meta, scale, window, *extras, out, splits)
    case.check(out)


EMPTY = [
    [(0, 9), (1, 70), (1, 3)],
    [(1, 70), (0, 1), (0, 90), (1, 3)],
    [(1, 70), (1, 3), (0, 5)],
    [(0, 1), (19, 30), (0, 0), (1, 40), (0, 7), (5, 5), (0, 2)],
]


@pytest.mark.parametrize("padding", [0, 130])
@pytest.mark.parametrize("rows", EMPTY, ids=["first", "middle", "last", "everywhere"])
def test_attention_empty_rows_and_padded_tokens(
    gpu_device: torch.device, rows: list[tuple[int, int]], padding: int
) -> None:
    case = make_case(gpu_device, Shape(), rows, padding)
    case.check(paged_attention.paged_attention(*case.arguments))


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_attention_writes_into_a_given_output(
    gpu_device: torch.device, rows: list[tuple[int, int]]
) -> None:
    case = make_case(gpu_device, Shape(), rows, padding=3)
    buffer = torch.full((len(case.want) + 8, 6, 32), float("nan"), device=gpu_device)
    q, k_cache, v_cache, meta, scale, window, *_ = case.arguments
    given = buffer[2:-3]
    out = paged_attention.paged_attention(q, k_cache, v_cache, meta, scale, window, given)
    case.check(out)
    assert out is given
    assert buffer[:2].isnan().all() and buffer[-3:].isnan().all()


def test_attention_a_padded_row_sees_the_scratch_page_only(gpu_device: torch.device) -> None:
    case = make_case(gpu_device, Shape(), [(1, 70), (1, 1)])
    meta = case.arguments[3]
    meta.seq_lens[1] = 0
    out = paged_attention.paged_attention(*case.arguments)
    torch.testing.assert_close(out[0].cpu().double(), case.want[0], rtol=2e-5, atol=2e-5)
    assert not out[1].any()


def test_attention_survives_large_scores(gpu_device: torch.device) -> None:
    case = make_case(gpu_device, Shape(), MIXED)
    q, k_cache, v_cache, *rest = case.arguments
    out = paged_attention.paged_attention(q * 1e4, k_cache, v_cache, *rest)
    assert out.isfinite().all()
    assert (out.abs() <= v_cache[v_cache.isfinite()].abs().max() * 1.0001).all()


def test_attention_bad_number_in_a_key_shows(gpu_device: torch.device) -> None:
    case = make_case(gpu_device, Shape(), [(1, 40), (1, 40)])
    _, k_cache, _, meta, *_ = case.arguments
    k_cache[int(meta.page_table[meta.req_slot[1], 1]) * 16 + 3] = float("nan")
    out = paged_attention.paged_attention(*case.arguments)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("batch", range(4))
def test_attention_random_batches(gpu_device: torch.device, batch: int) -> None:
    kv_heads = random.choice([1, 2, 3])
    shape = Shape(
        q_heads=kv_heads * random.choice([1, 3, 5, 8]),
        kv_heads=kv_heads,
        dim=random.choice([16, 48, 64]),
        page_size=random.randint(1, 64),
        window=random.choice([None, random.randint(1, 200)]),
        dtype=random.choice([torch.float32, torch.bfloat16]),
        sinks=random.choice([False, True]),
        softcap=random.choice([None, 5.0]),
    )
    lengths = [
        (q_len := random.choice([1, 1, random.randint(2, 50)]), q_len + random.randint(0, 150))
        for _ in range(2 * batch + 1)
    ]
    check(gpu_device, shape, lengths)


def test_splits_follow_from_the_batch_alone(gpu_device: torch.device) -> None:
    counts = [decode_attention.num_splits(programs, gpu_device) for programs in (1, 8, 64, 10**6)]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 1 and counts[0] > 1
