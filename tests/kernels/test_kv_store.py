"""Cache writes: the named slots change, no other does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treadle.kernels import kv_store, reference

Implementation = Callable[..., Callable[..., Any]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "kv_heads", "dim"), [(1, 3, 64), (200, 3, 64), (7, 1, 10)])
def test_store_kv_writes_only_its_slots(
    implementation: Implementation, dtype: torch.dtype, tokens: int, kv_heads: int, dim: int
) -> None:
    fused = torch.randn(tokens, 2 * kv_heads + 1, dim).to(dtype)
    k, v = fused[:, 1 : 1 + kv_heads], fused[:, 1 + kv_heads :]
    k_cache = torch.randn(300, kv_heads, dim).to(dtype)
    v_cache = torch.randn(300, kv_heads, dim).to(dtype)
    slots = torch.randperm(300)[:tokens]
    want_k = reference.store_kv(k, k_cache, slots)
    want_v = reference.store_kv(v, v_cache, slots)
    implementation(kv_store, "store_kv")(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_kv_replays_into_other_slots(played: Callable[..., Any], dtype: torch.dtype) -> None:
    fused = torch.randn(6, 5, 16).to(dtype)
    k, v = fused[:, 1:3], fused[:, 3:]
    k_cache, v_cache = torch.randn(2, 40, 2, 16).to(dtype)
    slots = torch.zeros(6, dtype=torch.int64)
    before = (k_cache.clone(), v_cache.clone())

    def change() -> None:
        fused.copy_(torch.randn(fused.shape))
        slots.copy_(torch.randperm(40)[:6])

    played(lambda: kv_store.store_kv(k, v, k_cache, v_cache, slots), change)
    assert torch.equal(k_cache, reference.store_kv(k, before[0], slots))
    assert torch.equal(v_cache, reference.store_kv(v, before[1], slots))


def test_store_kv_converts_to_the_cache_dtype() -> None:
    k, v = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    k_cache = torch.zeros(9, 2, 16, dtype=torch.bfloat16)
    v_cache = k_cache.clone()
    slots = torch.tensor([8, 0, 3, 5])
    kv_store.store_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots], k.bfloat16())
    assert torch.equal(v_cache[slots], v.bfloat16())
