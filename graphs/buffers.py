"""Rings through which a step's inputs reach the device and its tokens come back.

Knows arrays and their places; never what a plan means. A ring has one slot more than there may be
steps in flight; a slot is reused only after its step's result has been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from treadle.graphs.device import Device

_ALIGN = 8  # bytes; the widest element
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


class InputRing:
    """Packs a step's arrays into one staging buffer and copies them in one go."""

    def __init__(self, device: Device, slots: int, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._staging = [device.staging(num_bytes) for _ in range(slots)]
        self._arriving = [self._make_arriving(buffer) for buffer in self._staging]

    def fill(self, seq: int, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """The arrays as device tensors of the same shapes, valid until the slot's next turn."""
        slot = seq % len(self._staging)
        places, total = {}, 0
        for name, array in arrays.items():
            places[name] = total
            total += -(-array.nbytes // _ALIGN) * _ALIGN
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

    def _make_arriving(self, staging: torch.Tensor) -> torch.Tensor:
        if self._device.is_host:
            return staging
        return torch.empty_like(staging, device=self._device.torch_device, pin_memory=False)


class ResultRing:
    """Sampled tokens on their way to the host."""

    def __init__(self, device: Device, slots: int, rows: int) -> None:
        shape = (slots, rows)
        self._sampled = torch.zeros(shape, dtype=torch.int64, device=device.torch_device)
        self._read = (
            self._sampled
            if device.is_host
            else device.staging(slots * rows * 8).view(torch.int64).view(shape)
        )

    def put(self, seq: int, tokens: torch.Tensor) -> None:
        """The step's last device work: tokens [N] int64 into the slot, then towards the host."""
        slot, count = seq % len(self._sampled), len(tokens)
        self._sampled[slot, :count].copy_(tokens)
        if self._read is not self._sampled:
            self._read[slot, :count].copy_(self._sampled[slot, :count], non_blocking=True)

    def take(self, seq: int, count: int) -> npt.NDArray[np.int64]:
        """What `put` stored; called once the step's event has passed."""
        tokens: npt.NDArray[np.int64] = self._read[seq % len(self._read), :count].numpy().copy()
        return tokens
