"""Writing new keys and values into the paged cache.

Knows flat token slots only: which request owns them is the caller's business.

Axes: T tokens, K kv heads, D head dim, N token slots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def store_kv(
    k: Tensor,  # [T, K, D] any strides
    v: Tensor,  # [T, K, D] any strides
    k_cache: Tensor,  # [N, K, D] any strides; written
    v_cache: Tensor,  # [N, K, D] any strides; written
    slot_mapping: Tensor,  # [T] int32 or int64
) -> None:
    """As `treadle.kernels.kv_store.store_kv`, keys and values in one launch."""
    tokens, heads, dim = k.shape
    if not k.numel():
        return
    block = min(_BLOCK, triton.next_power_of_2(heads * dim))
    store_kv_kernel[(tokens, triton.cdiv(heads * dim, block))](
        k, v, k_cache, v_cache, slot_mapping.contiguous(),
        *k.stride(), *v.stride(), *k_cache.stride(), *v_cache.stride(),
        WIDTH=heads * dim, D=dim, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    k_t: tl.tensor,  # strides
    k_h: tl.tensor,
    k_d: tl.tensor,
    v_t: tl.tensor,
    v_h: tl.tensor,
    v_d: tl.tensor,
    kc_n: tl.tensor,
    kc_h: tl.tensor,
    kc_d: tl.tensor,
    vc_n: tl.tensor,
    vc_h: tl.tensor,
    vc_d: tl.tensor,
    WIDTH: tl.constexpr,  # K * D
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    head = i // D
    d = i % D
    slot = tl.load(slot_mapping + t).to(tl.int64)
    key = tl.load(k + t * k_t + head * k_h + d * k_d, mask=inside)
    value = tl.load(v + t * v_t + head * v_h + d * v_d, mask=inside)
    k_place = k_cache + slot * kc_n + head * kc_h + d * kc_d
    v_place = v_cache + slot * vc_n + head * vc_h + d * vc_d
    tl.store(k_place, key.to(k_cache.dtype.element_ty), mask=inside)
    tl.store(v_place, value.to(v_cache.dtype.element_ty), mask=inside)
