"""Rows picked out of a table, added up and widened: what joins the pieces of a model.

Knows nothing of what the rows are.

Axes: N rows of a table, T rows picked, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treadle.kernels import host

_gather_rows = host.function("treadle_gather_rows", [*[host.POINTER] * 3, *[host.SIZE] * 2])
_gather_part = host.function("treadle_gather_part", [*[host.POINTER] * 3, *[host.SIZE] * 4])
_add = host.function("treadle_add", [host.INT, *[host.POINTER] * 2, host.SIZE])
_widen = host.function("treadle_widen", [*[host.POINTER] * 2, host.SIZE])


def gather_rows(
    table: Tensor,  # [N, D] contiguous
    indices: Tensor,  # [T] int64, each below N
    out: Tensor | None = None,  # [T, D]
) -> Tensor:
    """table[indices], written into `out` where it is given."""
    if out is None:
        out = host.empty((len(indices), table.shape[1]), table.dtype, table.device)
    if _gather_rows is not None and table.is_cpu:
        _gather_rows(
            table.data_ptr(),
            indices.data_ptr(),
            out.data_ptr(),
            len(indices),
            table.shape[1] * table.itemsize,
        )
        return out
    torch.index_select(table, 0, indices, out=out)
    return out


def gather_part(
    table: Tensor,  # [N, D] contiguous: rows first, first + 1 ... of a larger one
    indices: Tensor,  # [T] int64, into the larger table
    first: int,
    out: Tensor,  # [T, D] contiguous
) -> None:
    """The rows that this table has; zeros for the others."""
    if _gather_part is not None and table.is_cpu:
        _gather_part(
            table.data_ptr(),
            indices.data_ptr(),
            out.data_ptr(),
            len(indices),
            table.shape[1] * table.itemsize,
            first,
            len(table),
        )
        return
    places = indices - first
    kept = places.clamp(0, len(table) - 1)
    torch.index_select(table, 0, kept, out=out)
    out.masked_fill_((places != kept).unsqueeze(1), 0)


def add_to(total: Tensor, x: Tensor) -> None:
    """total += x, both [T, D] contiguous, of one dtype."""
    kind = host.kind(x)
    if _add is not None and kind is not None:
        _add(kind, total.data_ptr(), x.data_ptr(), x.numel())
        return
    total.add_(x)


def widen(x: Tensor, out: Tensor) -> None:
    """Copies x [T, D] of any float dtype into `out`, which is fp32."""
    if _widen is not None and x.is_cpu and x.dtype is torch.bfloat16:
        _widen(x.data_ptr(), out.data_ptr(), x.numel())
    else:
        host.call(Tensor.copy_, out, x)
