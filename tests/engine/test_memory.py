from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.memory import (
    GB,
    MIB,
    Equation,
    ModelFacts,
    Work,
    automatic_fraction,
    graph_bytes,
    kv_bytes,
    pool_pages,
    rows_beside,
    tier_of,
)


def facts(**changed: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "max_position": 8192, "bytes_per_token": 131072, "weight_bytes": 16 * GB,
        "free_bytes": 64 * GB, "capacity_bytes": 80 * GB, "step_bytes_per_token": 140_000,
        "step_bytes_per_row": 128256 * 16, "is_host": False,
    }  # fmt: skip
    return ModelFacts(**{**values, **changed})


@pytest.mark.parametrize(
    ("gigabytes", "chunk", "rows"),
    [(16, 2048, 8), (24, 4096, 48), (48, 4096, 32), (80, 8192, 256), (141, 8192, 256),
     (192, 16384, 512)],
)  # fmt: skip
def test_tier_is_that_of_the_gpus_size(gigabytes: int, chunk: int, rows: int) -> None:
    tier = tier_of(gigabytes * GB)
    assert (tier.chunk_size, tier.decode_rows) == (chunk, rows)


def test_tier_changes_at_its_bound() -> None:
    assert tier_of(20 * GB - 1).chunk_size == 2048 and tier_of(20 * GB).chunk_size == 4096


def test_graphs_take_their_share_per_row_and_bucket() -> None:
    rows, buckets = random.randint(1, 600), random.randint(1, 80)
    assert graph_bytes(facts(), rows, buckets) == (rows * 2 + buckets * 8) * MIB
    assert graph_bytes(facts(), rows, 0) + graph_bytes(facts(), 0, buckets) == graph_bytes(
        facts(), rows, buckets
    )
    assert graph_bytes(facts(), 0, 0) == graph_bytes(facts(is_host=True), rows, buckets) == 0


@pytest.mark.parametrize(
    ("gigabytes", "chunk", "rows", "buckets"),
    [(24, 4096, 48, 50), (48, 4096, 32, 50), (80, 8192, 256, 58), (192, 16384, 512, 74)],
)
def test_automatic_fraction_of_a_gpu_is_sglangs(
    gigabytes: int, chunk: int, rows: int, buckets: int
) -> None:
    total = gigabytes * 1024
    graphs = rows * 2 + 8 * buckets
    reserved = 512 + 1.5 * chunk + 1024 / 8 + graphs
    if total > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    of = facts(capacity_bytes=total * MIB, free_bytes=(total - 2048) * MIB, weight_bytes=2048 * MIB)
    found = automatic_fraction(of, Work(chunk, rows, 100), chunk, graphs * MIB)
    assert found == round((total - reserved) / total, 3)


def test_automatic_fraction_leaves_room_for_what_the_model_really_needs() -> None:
    hungry = facts(step_bytes_per_token=4 * MIB)
    work = Work(8192, 256, 8_000_000)
    reserved = (1 - automatic_fraction(hungry, work, 2048, GB)) * hungry.total_bytes
    assert reserved >= work.activation_bytes(hungry) + work.table_bytes + GB


@pytest.mark.parametrize("free", [200 * MIB, 4 * GB, 60 * GB])
def test_automatic_fraction_of_a_host_leaves_activations_and_a_reserve(free: int) -> None:
    host = facts(is_host=True, free_bytes=free, step_bytes_per_token=100, step_bytes_per_row=1000)
    work = Work(512, 256, 100_000)
    left = (1 - automatic_fraction(host, work, 512, 0)) * host.total_bytes
    needed = work.activation_bytes(host) + work.table_bytes
    slack = left - needed - min(512 * MIB, free // 8)
    assert 0 <= slack <= host.total_bytes / 1000 + 1


@given(
    fraction=st.floats(0.01, 0.99),
    page=st.integers(1, 300),
    per_token=st.integers(1, 10**6),
    weights=st.integers(0, 10**11),
    free=st.integers(1, 10**11),
)
def test_pool_and_its_scratch_page_stay_within_the_fraction(
    fraction: float, page: int, per_token: int, weights: int, free: int
) -> None:
    of = facts(bytes_per_token=per_token, weight_bytes=weights, free_bytes=free)
    pages = pool_pages(of, fraction, page)
    static = weights + kv_bytes(of, pages * page, page, Work(1, 0, 1))
    assert pages >= 0
    if pages:
        assert static <= fraction * of.total_bytes < static + page * per_token + 1


def test_tables_and_scratch_page_count_as_kv() -> None:
    assert kv_bytes(facts(bytes_per_token=10), 160, 16, Work(1, 3, 20)) == 1760 + 3 * 20 * 4


@given(st.lists(st.integers(0, 10**12), min_size=5, max_size=5))
def test_printed_terms_add_up_and_round_the_real_ones(amounts: list[int]) -> None:
    total_, weights, kv, activations, graphs = amounts
    equation = Equation(total_, weights, kv, activations, graphs, step_tokens=512)
    assert equation.reserve == amounts[0] - sum(amounts[1:])
    total, *terms = (round(100 * float(x)) for x in re.findall(r"(-?[\d.]+) GB", str(equation)))
    assert len(terms) == 5 and total == sum(terms)
    for cents, amount in zip((total, *terms), (*amounts, equation.reserve), strict=True):
        assert abs(cents / 100 - amount / GB) < (0.031 if amount == equation.reserve else 0.0051)
    assert "(peak at chunk size 512)" in str(equation)


def test_rows_take_half_of_what_is_left() -> None:
    of = facts(free_bytes=10_000, step_bytes_per_token=10, step_bytes_per_row=60)
    assert rows_beside(of, 3000, 1000, Work(200, 999, 10)) == (10_000 - 3000 - 1000 - 2000) // 200
    assert rows_beside(of, 9000, 1000, Work(200, 999, 10)) == 0
