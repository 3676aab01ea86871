"""Where a step's inputs stand on the device and how its tokens come back.

Knows plans as arrays and their places; never a model. What graphs read lies at fixed addresses: the
head of the inputs, row by row, filled for every step and padded with rows that touch nothing real.
The rest has another shape in every step, and only code outside of graphs reads it.

Staging and results pass through rings with one slot more than there may be steps in flight; a slot
is used again only after its step's result has been read.

Axes: R rows of a plan, B rows of a bucket, N rows that sample, T tokens, U page-table updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from treadle.graphs.device import Device, Event

_ALIGN = 8  # bytes; the widest element
_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The rows that sample, and page-table entries to write first. At fixed addresses."""

    slots: Tensor  # [B] int64
    temperature: Tensor  # [B] fp32
    logit_rows: Tensor  # [B] int64, the token of the step whose logits the row samples from
    page_place: Tensor  # [B] int64, flat places in the page table
    page_id: Tensor  # [B] int32

    def first(self, rows: int) -> RowInputs:
        return RowInputs(*(getattr(self, each.name)[:rows] for each in fields(self)))


@dataclass(frozen=True, slots=True)
class Padding:
    """What rows beyond the plan's own hold."""

    slot: int
    page_place: int
    page_id: int

    def values(self) -> dict[str, int]:
        return {"slots": self.slot, "temperature": 0, "logit_rows": 0,
                "page_place": self.page_place, "page_id": self.page_id}  # fmt: skip


_ROW_DTYPES: dict[str, np.dtype[Any]] = {
    "slots": np.dtype(np.int64),
    "temperature": np.dtype(np.float32),
    "logit_rows": np.dtype(np.int64),
    "page_place": np.dtype(np.int64),
    "page_id": np.dtype(np.int32),
}


class InputBuffers:
    """One staged copy brings a step's rows to their fixed places, a second one what is ragged."""

    def __init__(self, device: Device, slots: int, rows: int, padding: Padding) -> None:
        """slots: of the ring. rows: the most that a step may have."""
        self._padding = padding.values()
        self._rows = rows
        places, self._row_bytes = _places(
            {name: rows * dtype.itemsize for name, dtype in _ROW_DTYPES.items()}
        )
        self._staging = [device.staging(self._row_bytes) for _ in range(slots)]
        self._staged = [self._views(buffer.numpy(), places) for buffer in self._staging]
        self._fixed = torch.zeros(self._row_bytes, dtype=torch.uint8, device=device.torch_device)
        self.rows = RowInputs(
            **{
                name: self._fixed[places[name] : places[name] + rows * dtype.itemsize].view(
                    _DTYPES[dtype]
                )
                for name, dtype in _ROW_DTYPES.items()
            }
        )
        self._ragged = RaggedRing(device, slots)

    def fill(self, seq: int, rows: int, arrays: Arrays, ragged: Arrays) -> dict[str, Tensor]:
        """Writes the rows to their places and pads them; returns the ragged arrays on the device.

        rows: of the bucket. arrays: by the names of RowInputs, each at most so long.
        """
        slot = seq % len(self._staging)
        for name, view in self._staged[slot].items():
            array = arrays.get(name)
            count = 0 if array is None else len(array)
            if array is not None:
                view[:count] = array
            view[count:rows] = self._padding[name]
        self._fixed.copy_(self._staging[slot], non_blocking=True)
        return self._ragged.fill(slot, ragged) if ragged else {}

    def pad_all(self) -> None:
        """Every row becomes padding, before a warm-up."""
        for name, value in self._padding.items():
            getattr(self.rows, name).fill_(value)

    def _views(
        self, flat: npt.NDArray[np.uint8], places: Mapping[str, int]
    ) -> dict[str, npt.NDArray[Any]]:
        return {
            name: flat[places[name] : places[name] + self._rows * dtype.itemsize].view(dtype)
            for name, dtype in _ROW_DTYPES.items()
        }


class RaggedRing:
    """Packs arrays of any length into one staging buffer and copies them in one go."""

    def __init__(self, device: Device, slots: int, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._staging = [device.staging(num_bytes) for _ in range(slots)]
        self._arriving = [self._make_arriving(buffer) for buffer in self._staging]

    def fill(self, slot: int, arrays: Arrays) -> dict[str, Tensor]:
        """The arrays as device tensors of the same shapes, valid until the slot's next turn."""
        places, total = _places({name: array.nbytes for name, array in arrays.items()})
        if total > self._staging[slot].numel():
            self._staging[slot] = self._device.staging(2 * total)
            self._arriving[slot] = self._make_arriving(self._staging[slot])
        staging, arriving = self._staging[slot], self._arriving[slot]
        flat = staging.numpy()
        for name, array in arrays.items():
            start = places[name]
            flat[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        if arriving is not staging:
            arriving[:total].copy_(staging[:total], non_blocking=True)
        return {
            name: arriving[places[name] : places[name] + array.nbytes]
            .view(_DTYPES[array.dtype])
            .view(array.shape)
            for name, array in arrays.items()
        }

    def _make_arriving(self, staging: Tensor) -> Tensor:
        if self._device.is_host:
            return staging
        return torch.empty_like(staging, device=self._device.torch_device, pin_memory=False)


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where arrays of so many bytes begin, one after the other, and where the last one ends."""
    places, total = {}, 0
    for name, size in sizes.items():
        places[name] = total
        total += -(-size // _ALIGN) * _ALIGN
    return places, total


class ResultRing:
    """Sampled tokens on their way to the host."""

    def __init__(self, device: Device, slots: int, rows: int) -> None:
        shape = (slots, rows)
        self._device = device
        self._sampled = torch.zeros(shape, dtype=torch.int64, device=device.torch_device)
        self._read = (
            self._sampled
            if device.is_host
            else device.staging(slots * rows * 8).view(torch.int64).view(shape)
        )

    def put(self, seq: int, tokens: Tensor) -> Event:
        """The step's last device work: tokens [N] int64 into the slot, then towards the host.

        The copy to the host runs beside the next step. Returns when it has arrived.
        """
        slot, count = seq % len(self._sampled), len(tokens)
        self._sampled[slot, :count].copy_(tokens)
        if self._read is self._sampled:
            return self._device.record()
        return self._device.copy_out(self._read[slot, :count], self._sampled[slot, :count])

    def take(self, seq: int, count: int) -> npt.NDArray[np.int64]:
        """What `put` stored; called once its event has passed."""
        tokens: npt.NDArray[np.int64] = self._read[seq % len(self._read), :count].numpy().copy()
        return tokens
