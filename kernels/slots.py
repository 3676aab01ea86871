"""State that the device keeps per slot, and what a step reads and writes of it.

Knows slots, lengths and page tables; never a request, a model or what a token means. The last slot
is scratch: padded rows use it, its length stays 0 and its pages are the scratch page.

Axes: S slots and the scratch slot, P pages of a sequence, R rows, T tokens, N rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.kernels import host

_prepare_decode = host.function("treadle_prepare_decode", [*[host.POINTER] * 8, *[host.SIZE] * 4])
_prepare_tokens = host.function("treadle_prepare_tokens", [*[host.POINTER] * 11, *[host.SIZE] * 3])
_update_pages = host.function("treadle_update_pages", [*[host.POINTER] * 3, host.SIZE])
_sampling_state = host.function("treadle_sampling_state", [*[host.POINTER] * 5, host.SIZE])
_feed_back = host.function("treadle_feed_back", [*[host.POINTER] * 3, host.SIZE])


@dataclass(frozen=True, slots=True)
class SlotState:
    """Written by the kernels below, in the order of the steps."""

    length: Tensor  # [S + 1] int64, tokens whose KV stands in the slot's pages
    last_token: Tensor  # [S + 1] int64
    seed: Tensor  # [S + 1] int64
    page_table: Tensor  # [S + 1, P] int32, contiguous
    page_size: int

    @property
    def scratch_slot(self) -> int:
        return len(self.length) - 1


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What the model reads of a step's tokens, and attention of its rows."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    seq_lens: Tensor  # [R] int32, with the step's tokens


@dataclass(frozen=True, slots=True)
class HostRows:
    """A step's rows as the host sends them."""

    slots: Tensor  # [R] int64, each once
    cu_seqlens: Tensor  # [R + 1] int32
    from_host: Tensor  # [R] bool
    host_ids: Tensor  # [T] int64, undefined for rows that are not from the host
    row: Tensor  # [T] int64, the row of each token


def prepare_decode(state: SlotState, slots: Tensor, out: TokenInputs) -> None:
    """One token for each row: its slot's last one, at the slot's length, which moves on.

    slots: [R] int64; the scratch slot may stand there many times.
    """
    rows = len(slots)
    if _prepare_decode is not None and slots.is_cpu:
        _prepare_decode(
            slots.data_ptr(),
            state.length.data_ptr(),
            state.last_token.data_ptr(),
            state.page_table.data_ptr(),
            out.token_ids.data_ptr(),
            out.positions.data_ptr(),
            out.slot_mapping.data_ptr(),
            out.seq_lens.data_ptr(),
            rows,
            state.page_table.stride(0),
            state.page_size,
            state.scratch_slot,
        )
        return
    torch.index_select(state.last_token, 0, slots, out=out.token_ids[:rows])
    torch.index_select(state.length, 0, slots, out=out.positions[:rows])
    _map_slots(state, slots, out, rows)
    lengths = out.positions[:rows] + 1
    out.seq_lens[:rows].copy_(lengths)
    state.length.index_copy_(0, slots, lengths)
    state.length[-1:].zero_()


def prepare_tokens(state: SlotState, rows: HostRows, out: TokenInputs) -> None:
    """The tokens of rows of any length; writes the first T of `out` and moves the lengths on."""
    count, tokens = len(rows.slots), len(rows.host_ids)
    if _prepare_tokens is not None and rows.slots.is_cpu:
        _prepare_tokens(
            rows.slots.data_ptr(),
            rows.cu_seqlens.data_ptr(),
            rows.from_host.data_ptr(),
            rows.host_ids.data_ptr(),
            state.length.data_ptr(),
            state.last_token.data_ptr(),
            state.page_table.data_ptr(),
            out.token_ids.data_ptr(),
            out.positions.data_ptr(),
            out.slot_mapping.data_ptr(),
            out.seq_lens.data_ptr(),
            count,
            state.page_table.stride(0),
            state.page_size,
        )
        return
    start, slots = state.length[rows.slots], rows.slots[rows.row]
    offset = torch.arange(tokens, device=slots.device) - rows.cu_seqlens[:-1].long()[rows.row]
    out.positions[:tokens].copy_(start[rows.row] + offset)
    ids = torch.where(rows.from_host[rows.row], rows.host_ids, state.last_token[slots])
    out.token_ids[:tokens].copy_(ids)
    _map_slots(state, slots, out, tokens)
    lengths = start + rows.cu_seqlens.diff()
    out.seq_lens[:count].copy_(lengths)
    state.length.index_copy_(0, rows.slots, lengths)


def update_pages(page_table: Tensor, places: Tensor, page_ids: Tensor) -> None:
    """Writes page ids [U] int32 at flat places [U] int64 of the table.

    A place may be named twice with the same page.
    """
    if _update_pages is not None and page_table.is_cpu:
        _update_pages(page_table.data_ptr(), places.data_ptr(), page_ids.data_ptr(), len(places))
        return
    page_table.view(-1).index_copy_(0, places, page_ids)


def sampling_state(state: SlotState, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Seeds and positions [N] int64 of the rows that sample."""
    if _sampling_state is not None and slots.is_cpu:
        seeds, positions = host.empty_like(slots), host.empty_like(slots)
        _sampling_state(
            slots.data_ptr(),
            state.seed.data_ptr(),
            state.length.data_ptr(),
            seeds.data_ptr(),
            positions.data_ptr(),
            len(slots),
        )
        return seeds, positions
    return state.seed[slots], state.length[slots]


def feed_back(state: SlotState, slots: Tensor, tokens: Tensor) -> None:
    """The sampled tokens [N] int64 become their slots' last."""
    if _feed_back is not None and slots.is_cpu:
        _feed_back(slots.data_ptr(), tokens.data_ptr(), state.last_token.data_ptr(), len(slots))
        return
    state.last_token.index_copy_(0, slots, tokens)


def _map_slots(state: SlotState, slots: Tensor, out: TokenInputs, count: int) -> None:
    positions = out.positions[:count]
    page = torch.div(positions, state.page_size, rounding_mode="floor")
    pages = state.page_table.view(-1)[slots * state.page_table.shape[1] + page]
    out.slot_mapping[:count].copy_(pages.long() * state.page_size + positions % state.page_size)
