"""Writing new keys and values into the paged cache.

Knows flat token slots only: which request owns them is the caller's business.

Axes: T tokens, K kv heads, D head dim, N token slots.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels import host

_store_kv = host.function(
    "treadle_store_kv",
    [*[host.POINTER] * 5, *[host.SIZE] * 4],
)


def store_kv(
    k: Tensor,  # [T, K, D] may be a strided view
    v: Tensor,  # [T, K, D] may be a strided view
    k_cache: Tensor,  # [N, K, D] written
    v_cache: Tensor,  # [N, K, D] written
    slot_mapping: Tensor,  # [T] int64
) -> None:
    """Writes token t to slot `slot_mapping[t]` in the cache's dtype.

    Where a slot is named twice, which token ends up there is undefined.
    """
    is_plain = _is_copyable(k, k_cache) and _is_copyable(v, v_cache)
    if _store_kv is None or not is_plain or not slot_mapping.is_contiguous():
        store_kv_torch(k, v, k_cache, v_cache, slot_mapping)
        return
    item = k.element_size()
    _store_kv(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        k.shape[0],
        k.shape[1] * k.shape[2] * item,
        k.stride(0) * item,
        v.stride(0) * item,
    )


def store_kv_torch(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    k_cache.index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.index_copy_(0, slot_mapping, v.to(v_cache.dtype))


def _is_copyable(x: Tensor, cache: Tensor) -> bool:
    """Whether a token's heads lie as one run of bytes in both, in one dtype."""
    return (
        x.is_cpu
        and x.dtype is cache.dtype
        and cache.is_contiguous()
        and x.stride(2) == 1
        and x.stride(1) == x.shape[2]
    )
