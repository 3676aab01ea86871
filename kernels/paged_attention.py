"""Causal attention of new queries over a paged cache, decode and prefill rows in one call.

Knows slots, pages and lengths: never a request, nor how the pages were allocated.

Axes: T tokens, R rows, H query heads, K kv heads, D head dim, N token slots, S rows of the page
table, P pages of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from treadle.kernels import gpu, host

_paged_attention = host.function(
    "treadle_paged_attention",
    [host.INT, *[host.POINTER] * 8, *[host.SIZE] * 8, host.FLOAT],
)
_MAX_HOST_DIM = 256
_NO_WINDOW = 1 << 40

_BLOCK_SCORES = 1 << 22  # fp32 scores that the torch version holds at once: 16 MiB


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Where each row's queries and cached tokens are.

    Row r owns queries cu_seqlens_q[r]:cu_seqlens_q[r + 1], the last positions of its sequence. Its
    position p lies in cache slot page_table[s, p // page_size] * page_size + p % page_size, where
    s = req_slot[r]. What no visible position needs may hold anything: entries of the page table,
    and of a row without queries everything else.
    """

    cu_seqlens_q: Tensor  # [R + 1] int32, starts at 0, never decreases
    seq_lens: Tensor  # [R] int32, tokens of the row after this step
    req_slot: Tensor  # [R] int64, the row's place in the page table
    page_table: Tensor  # [S, P] int32, may be a strided view
    page_size: int  # tokens
    max_q_len: int  # tokens, at least the longest row's, from 1
    max_seq_len: int  # tokens, at least the longest row's

    def __post_init__(self) -> None:
        for tensor in (self.cu_seqlens_q, self.seq_lens, self.page_table):
            assert tensor.dtype is torch.int32 and tensor.stride(-1) == 1
        assert self.req_slot.dtype is torch.int64 and self.req_slot.stride(-1) == 1


def paged_attention(
    q: Tensor,  # [T, H, D]
    k_cache: Tensor,  # [N, K, D] H is a multiple of K
    v_cache: Tensor,  # [N, K, D]
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,  # [T, H, D] q's dtype, contiguous
) -> Tensor:  # [T, H, D] out, or a new one
    """Softmax attention in fp32; the cache already holds the queries' own keys and values.

    window: a query at position p sees the keys at positions above p - window.
    Of the output, tokens that belong to no row are left as they are.
    """
    if gpu.serves(q):
        from treadle.kernels.gpu import paged_attention as triton_attention

        return triton_attention.paged_attention(q, k_cache, v_cache, meta, scale, window, out)
    kind = host.kind(q)
    _, q_heads, dim = q.shape
    q_stride, *q_inner = q.stride()
    can_compile = (
        k_cache.dtype is q.dtype
        and k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and q_inner == [dim, 1]
        and dim % 16 == 0
        and dim <= _MAX_HOST_DIM
    )
    if _paged_attention is None or kind is None or not can_compile:
        return paged_attention_torch(q, k_cache, v_cache, meta, scale, window, out)
    out = host.empty_like(q) if out is None else out
    assert out.is_contiguous() and out.shape == q.shape and out.dtype is q.dtype
    _paged_attention(
        kind,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        meta.cu_seqlens_q.data_ptr(),
        meta.seq_lens.data_ptr(),
        meta.req_slot.data_ptr(),
        meta.page_table.data_ptr(),
        meta.seq_lens.shape[0],
        q_heads,
        k_cache.shape[1],
        dim,
        meta.page_size,
        meta.page_table.stride(0),
        q_stride,
        _NO_WINDOW if window is None else window,
        scale,
    )
    return out


def paged_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode rows run as padded batches, longer rows one after the other in blocks of queries."""
    cache = _Cache(k_cache, v_cache, meta.page_size, scale, window)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if meta.max_q_len == 1:
        _decode_batch(q, cache, meta, out)
        return out
    starts, lengths = meta.cu_seqlens_q.tolist(), meta.seq_lens.tolist()
    q_lens = [end - begin for begin, end in pairwise(starts)]
    single = [r for r, q_len in enumerate(q_lens) if q_len == 1]
    if single:
        rows = torch.tensor(single, device=q.device)
        tokens = meta.cu_seqlens_q[rows]
        table = meta.page_table[meta.req_slot[rows]]
        longest = max(lengths[r] for r in single)
        piece = torch.empty_like(out[: len(single)])
        _decode(q[tokens], cache, meta.seq_lens[rows], table, longest, piece)
        out[tokens] = piece
    for r, q_len in enumerate(q_lens):
        if q_len > 1:
            row = slice(starts[r], starts[r + 1])
            table = meta.page_table[meta.req_slot[r : r + 1]]
            _prefill(q[row], cache, lengths[r], table, out[row])
    return out


@dataclass(frozen=True, slots=True)
class _Cache:
    k: Tensor  # [N, K, D]
    v: Tensor  # [N, K, D]
    page_size: int
    scale: float
    window: int | None

    def span(self, q_len: int, seq_len: int) -> int:
        """Positions that the last q_len queries of a row can see."""
        return seq_len if self.window is None else min(seq_len, self.window + q_len - 1)


def _decode_batch(q: Tensor, cache: _Cache, meta: AttentionMeta, out: Tensor) -> None:
    """Rows of one query or none, without a look at what only the device knows."""
    token = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    row = torch.searchsorted(meta.cu_seqlens_q[1:], token, right=True)
    is_real = row < meta.seq_lens.shape[0]
    row = row.clamp_max(meta.seq_lens.shape[0] - 1)
    seq_lens = meta.seq_lens[row].where(is_real, 1)
    longest = max(seq_lens.tolist(), default=1) if q.is_cpu else meta.max_seq_len
    slots = meta.req_slot[row].where(is_real, 0)
    table = meta.page_table[slots, : -(-longest // meta.page_size)]
    table = table.where(is_real.unsqueeze(1), 0)  # whatever else stands there is no page
    piece = torch.empty_like(out)
    _decode(q, cache, seq_lens, table, longest, piece)
    out.copy_(piece.where(is_real[:, None, None], out))


def _decode(
    q: Tensor,  # [R, H, D]
    cache: _Cache,
    seq_lens: Tensor,  # [R]
    page_table: Tensor,  # [R, P]
    longest: int,
    out: Tensor,  # [R, H, D] written
) -> None:
    span = cache.span(1, longest)
    rows = max(1, _BLOCK_SCORES // (span * q.shape[1]))
    for begin in range(0, q.shape[0], rows):
        part = slice(begin, begin + rows)
        block = _attend(q[part].unsqueeze(1), cache, seq_lens[part], page_table[part], span)
        out[part] = block.squeeze(1)


def _prefill(
    q: Tensor,  # [Q, H, D]
    cache: _Cache,
    seq_len: int,
    page_table: Tensor,  # [1, P]
    out: Tensor,  # [Q, H, D] written
) -> None:
    q_len, heads, _ = q.shape
    rows = max(1, _BLOCK_SCORES // (seq_len * heads))
    for begin in range(0, q_len, rows):
        end = min(begin + rows, q_len)
        seen = seq_len - q_len + end  # the block's last query is the last position of this prefix
        seq_lens = torch.tensor([seen], device=q.device)
        span = cache.span(end - begin, seen)
        out[begin:end] = _attend(q[None, begin:end], cache, seq_lens, page_table, span)[0]


def _attend(
    q: Tensor,  # [B, Q, H, D] the last Q positions of each sequence
    cache: _Cache,
    seq_lens: Tensor,  # [B]
    page_table: Tensor,  # [B, P]
    span: int,  # positions back from each sequence's end that any query can see
) -> Tensor:  # [B, Q, H, D] fp32
    batch, q_len, heads, dim = q.shape
    kv_heads = cache.k.shape[1]
    end = seq_lens.long().unsqueeze(1)
    keys = end - span + torch.arange(span, device=q.device)  # [B, L]
    queries = (end - q_len + torch.arange(q_len, device=q.device)).unsqueeze(2)  # [B, Q, 1]
    first = torch.zeros_like(end)
    visible = keys.unsqueeze(1) <= queries  # [B, Q, L]
    if cache.window is not None:
        first = (end - q_len - cache.window + 1).clamp_min(0)
        visible &= keys.unsqueeze(1) > queries - cache.window
    visible &= (keys >= first).unsqueeze(1)
    keys = torch.maximum(keys, first)  # never reads a slot that no query sees
    pages = page_table.gather(1, keys // cache.page_size).long()
    slots = pages * cache.page_size + keys % cache.page_size
    k, v = cache.k[slots].float(), cache.v[slots].float()  # [B, L, K, D]
    grouped = q.float().view(batch, q_len, kv_heads, heads // kv_heads, dim) * cache.scale
    scores = torch.einsum("bqkgd,blkd->bkgql", grouped, k)
    scores.masked_fill_(~visible[:, None, None], float("-inf"))
    mixed = torch.einsum("bkgql,blkd->bqkgd", scores.softmax(-1), v)
    return mixed.reshape(batch, q_len, heads, dim)
