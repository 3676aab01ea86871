"""Writing new keys and values into the paged cache.

Knows flat token slots only: which request owns them is the caller's business.

Axes: T tokens, K kv heads, D head dim, N token slots.
"""

from __future__ import annotations

from torch import Tensor

from treadle.kernels import gpu, host

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
    if gpu.serves(k):
        from treadle.kernels.gpu import kv_store

        kv_store.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    tokens, heads, dim = k.shape
    k_stride, *k_inner = k.stride()
    v_stride, *v_inner = v.stride()
    is_dense = k_inner == [dim, 1] and v_inner == [dim, 1] and slot_mapping.is_contiguous()
    if _store_kv is None or not is_dense or not _is_same_kind(k, k_cache, v, v_cache):
        store_kv_torch(k, v, k_cache, v_cache, slot_mapping)
        return
    item = k.itemsize
    _store_kv(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        tokens,
        heads * dim * item,
        k_stride * item,
        v_stride * item,
    )


def store_kv_torch(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    k_cache.index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.index_copy_(0, slot_mapping, v.to(v_cache.dtype))


def _is_same_kind(k: Tensor, k_cache: Tensor, v: Tensor, v_cache: Tensor) -> bool:
    return (
        k.is_cpu
        and k.dtype is k_cache.dtype
        and v.dtype is v_cache.dtype is k.dtype
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
    )
