"""Cases of paged attention: rows of one query, chunks with a cached prefix, both together.

Knows pages and lengths. Axes: R rows, H query heads, K kv heads, D head dim, N token slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.kernels import reference
from treadle.kernels.paged_attention import AttentionMeta, paged_attention_torch
from treadle.perf.gpu.kernel_cases import Case, Timed, error_of
from treadle.perf.gpu.sections import Setting

_HEADS, _KV_HEADS, _DIM = 32, 8, 128
_PAGE = 16
_TOLERANCE = 2.5e-2  # of the largest: bf16 weights meet the values, the result is rounded again
_SCALE = _DIM**-0.5

Rows = Sequence[tuple[int, int]]  # queries and tokens of each


@dataclass(frozen=True, slots=True)
class Batch:
    """Queries over a cache whose pages are shuffled."""

    q: Tensor  # [T, H, D]
    k: Tensor  # [N, K, D]
    v: Tensor  # [N, K, D]
    meta: AttentionMeta

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, AttentionMeta, float]:
        return self.q, self.k, self.v, self.meta, _SCALE


def make_batch(device: str, rows: Rows) -> Batch:
    pages = [-(-length // _PAGE) for _, length in rows]
    width, total = max(pages), sum(pages)
    ids, table = torch.randperm(total).int(), torch.zeros(len(rows), width, dtype=torch.int32)
    begin = 0
    for row, count in enumerate(pages):
        table[row, :count] = ids[begin : begin + count]
        begin += count
    q_lens = torch.tensor([q_len for q_len, _ in rows])
    cache = (total * _PAGE, _KV_HEADS, _DIM)
    q, k, v = (
        torch.randn(shape, device=device).bfloat16()
        for shape in ((int(q_lens.sum()), _HEADS, _DIM), cache, cache)
    )
    meta = AttentionMeta(
        torch.cat([torch.zeros(1, dtype=torch.int64), q_lens.cumsum(0)]).int().to(device),
        torch.tensor([length for _, length in rows]).int().to(device),
        torch.arange(len(rows)).to(device),
        table.to(device),
        _PAGE,
        int(q_lens.max()),
        max(length for _, length in rows),
    )
    return Batch(q, k, v, meta)


def attention_cases(setting: Setting) -> list[Case]:
    sizes: list[tuple[str, Rows, Rows]]
    if setting.is_tiny:
        sizes = [("attention decode", [(1, 5), (1, 33)], [(1, 20)] * 2)]
    else:
        small = [(1, 1), (1, 17), (1, 200)]
        sizes = [
            ("attention decode 64 x 4096", small, [(1, 4096)] * 64),
            ("attention decode 256 x 512", small, [(1, 512)] * 256),
            ("attention decode 1 x 32768", [(1, 1500)], [(1, 32_768)]),
            ("attention prefill 1 x 8192", [(33, 33), (20, 129)], [(8192, 8192)]),
            ("attention prefill 4 x 2048", [(70, 70), (5, 40)], [(2048, 2048)] * 4),
            ("attention prefill 512 of 8192", [(20, 300)], [(512, 8192)]),
            ("attention mixed", [(1, 70), (19, 19), (5, 130)], [(1, 4096)] * 63 + [(449, 449)]),
        ]
    return [
        Case(name, partial(_error, setting.device, small), partial(_timed, setting.device, large))
        for name, small, large in sizes
    ]


def _error(device: str, rows: Rows) -> float:
    from treadle.kernels.gpu.paged_attention import paged_attention

    batch = make_batch(device, rows)
    want = reference.paged_attention(
        batch.q.cpu(), batch.k.cpu(), batch.v.cpu(), [q for q, _ in rows], [n for _, n in rows],
        batch.meta.page_table.cpu(), _PAGE, _SCALE,
    )  # fmt: skip
    return error_of(paged_attention(*batch.arguments), want, _TOLERANCE, None)


def _timed(device: str, rows: Rows) -> Timed:
    from treadle.kernels.gpu.paged_attention import paged_attention

    batch = make_batch(device, rows)
    call = partial(paged_attention, *batch.arguments)
    read = sum(length for _, length in rows) * 2 * _KV_HEADS * _DIM * 2 + 2 * batch.q.nbytes
    pairs = sum(q_len * (2 * length - q_len + 1) / 2 for q_len, length in rows)
    is_decode = batch.meta.max_q_len == 1
    rival = partial(paged_attention_torch, *batch.arguments) if is_decode else _dense(batch, rows)
    return Timed(
        call,
        float(read) if is_decode else 0.0,
        0.0 if is_decode else 4 * _HEADS * _DIM * pairs,
        rival,
        _TOLERANCE,
        None,  # a mean of many values is small
    )


def _dense(batch: Batch, rows: Rows) -> partial[Tensor] | None:
    """torch's own attention over the same keys laid out in order, where the rows allow it."""
    lengths = {(q_len, length) for q_len, length in rows}
    if len(lengths) > 1 or any(q_len != length for q_len, length in rows):
        return None
    ((count, _),) = lengths
    slots = batch.meta.page_table.long().unsqueeze(-1) * _PAGE
    places = (slots + torch.arange(_PAGE, device=slots.device)).flatten(1)[:, :count]
    q = batch.q.view(len(rows), count, _HEADS, _DIM).transpose(1, 2)
    k, v = (x[places].transpose(1, 2) for x in (batch.k, batch.v))
    return partial(_attend, q, k, v)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)
