"""Records the host kernels that a piece of model code calls, to play them again without it.

Knows addresses, sizes and scalars; never a model. While a thread records, kernels are noted and
not run, their outputs come from a workspace that tapes share, and any torch operator that would
compute is refused: its result would be missing when the tape is played.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ARRAYS: dict[torch.dtype, type[np.generic]] = {  # of the same width, where NumPy has no such type
    torch.float32: np.float32, torch.bfloat16: np.int16, torch.float16: np.float16,
    torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip

ALIGN = 64  # bytes; a cache line, and a vector of the widest instruction set


class NotRecordable(RuntimeError):
    """The code computes something outside of the host kernels."""


class Workspace:
    """Memory for the outputs of recorded kernels; a block is free once no tensor uses it.

    Every tape starts with all of it: tapes run one after the other and share it.
    """

    def __init__(self, memory: Tensor) -> None:
        """memory: [bytes] uint8 on the host; the caller keeps its size in step with the needs."""
        self.size = memory.numel()
        self.peak = 0  # bytes that any tape has used
        self._whole = memory
        self._memory = memory.numpy()
        self._free = [(0, self.size)]  # (start, size), by start, never adjacent
        self._lock = threading.RLock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises: NotRecordable when nothing of the size is free."""
        count = math.prod(shape) * dtype.itemsize
        size = max(ALIGN, -(-count // ALIGN) * ALIGN)
        start = self._take(size)
        block = self._memory[start : start + count].view(_ARRAYS[dtype]).reshape(shape)
        # torch keeps the array alive as long as any tensor uses its memory
        weakref.finalize(block, self._give, start, size)
        made = torch.from_numpy(block)
        return made if made.dtype is dtype else made.view(dtype)

    def alias(self, x: Tensor) -> Tensor:
        """The same memory without a claim to it; a tensor from elsewhere as it is."""
        offset = x.data_ptr() - self._memory.ctypes.data
        if not 0 <= offset < self.size:
            return x
        start = offset // x.itemsize
        return self._whole.view(x.dtype).as_strided(x.shape, x.stride(), start)

    def _take(self, size: int) -> int:
        with self._lock:
            for place, (start, length) in enumerate(self._free):
                if length >= size:
                    rest = [(start + size, length - size)] if length > size else []
                    self._free[place : place + 1] = rest
                    self.peak = max(self.peak, start + size)
                    return start
        raise NotRecordable(f"the workspace of {self.size} bytes has no {size} bytes left")

    def _give(self, start: int, size: int) -> None:
        with self._lock:
            insort(self._free, (start, size))
            merged: list[tuple[int, int]] = []
            for begin, length in self._free:
                if merged and sum(merged[-1]) == begin:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((begin, length))
            self._free = merged


class Tape:
    """A sequence of kernel calls with fixed arguments.

    Keeps no tensor alive but those it is told to: whoever records keeps weights and buffers.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.num_calls = 0
        self._parts: list[list[int] | Callable[[], object]] = []
        self._counts: list[int] = []
        self._playable: list[Callable[[], object]] = []

    def note(self, address: int, words: Sequence[int]) -> None:
        """Adds a call of the library's `_words` function at the address."""
        if not self._parts or callable(self._parts[-1]):
            self._parts.append([])
            self._counts.append(0)
        part = self._parts[-1]
        assert isinstance(part, list)
        part += [address, len(words), *words]
        self._counts[-1] += 1
        self.num_calls += 1

    def note_call(
        self, operator: Callable[..., object], arguments: Sequence[Any], keywords: dict[str, Any]
    ) -> None:
        """Adds a call of a torch operator that allocates nothing: its output is given."""

        def alias(value: Any) -> Any:
            return self.workspace.alias(value) if isinstance(value, Tensor) else value

        kept = {name: alias(value) for name, value in keywords.items()}
        self._parts.append(partial(operator, *map(alias, arguments), **kept))
        self._counts.append(1)
        self.num_calls += 1

    def seal(self, play: Callable[[int, int], object]) -> None:
        """Ends recording. play: `treadle_play(address of words, calls)`."""
        for part, count in zip(self._parts, self._counts, strict=True):
            if callable(part):
                self._playable.append(part)
                continue
            words = np.array(part, dtype=np.int64)
            self._playable.append(_Played(play, words, count))
        self._parts, self._counts = [], []

    def play(self) -> None:
        for call in self._playable:
            call()


class _Played:
    """One run of library calls."""

    __slots__ = ("_address", "_calls", "_play", "_words")

    def __init__(self, play: Callable[[int, int], object], words: Any, calls: int) -> None:
        self._play = play
        self._words = words  # keeps the memory
        self._address = int(words.ctypes.data)
        self._calls = calls

    def __call__(self) -> None:
        self._play(self._address, self._calls)


class _Recording(threading.local):
    tape: Tape | None = None


_recording = _Recording()


def active() -> Tape | None:
    """The tape that this thread records, if it does."""
    return _recording.tape


@contextmanager
def record(tape: Tape) -> Iterator[None]:
    """Kernels called by this thread inside are noted on the tape instead of run.

    Raises: NotRecordable.
    """
    assert _recording.tape is None, "recordings do not nest"
    _recording.tape = tape
    try:
        with _ViewsOnly():  # type: ignore[no-untyped-call]
            yield
    finally:
        _recording.tape = None


def to_words(argtypes: Sequence[type], arguments: Sequence[Any]) -> list[int]:
    """A call's arguments as the 64-bit words that its `_words` function takes."""
    return [
        struct.unpack("<i", struct.pack("<f", value))[0]
        if kind is ctypes.c_float
        else int(value or 0)
        for kind, value in zip(argtypes, arguments, strict=True)
    ]


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets through what only looks at memory in another way."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks whether to import its compiler first, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            raise NotRecordable(f"{func} is not a host kernel")
        result = func(*args, **(kwargs or {}))
        looked_at = args[0].untyped_storage().data_ptr()
        for each in result if isinstance(result, list | tuple) else (result,):
            if each.untyped_storage().data_ptr() != looked_at:  # reshape and to may copy
                raise NotRecordable(f"{func} copies, and is not a host kernel")
        return result
