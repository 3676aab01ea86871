"""The commands that all ranks run in one order, and their bytes on the way.

Knows plans and keys as numbers and arrays; never a socket, a tensor or a model. An encoded command
is a sequence of 64-bit numbers, led by how many they are, then the raw bytes of arrays, each padded
to eight, all in a fixed order. An array's length is among the numbers; -1 stands for None.

Axes: R rows of a plan, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treadle.graphs.buckets import GraphKey, GraphKind
from treadle.graphs.step import (
    MEMORY_TAGS,
    Bools,
    GraphChoice,
    Int64s,
    MemoryTag,
    Mode,
    PageTableUpdate,
    SamplingBatch,
    SlotInit,
    Step,
    StepPlan,
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Finish a step whose forward has run, now that its mask is known."""

    seq: int
    mask: Bools | None  # [R, V]


@dataclass(frozen=True, slots=True)
class Capture:
    """Capture a graph. Answered."""

    key: GraphKey


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop a graph that another rank could not capture."""

    key: GraphKey


@dataclass(frozen=True, slots=True)
class Release:
    """Give memory back. Answered."""

    tags: tuple[MemoryTag, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Take memory again. Answered."""

    tags: tuple[MemoryTag, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """The last command."""


Command = Step | Sampling | Capture | Discard | Release | Resume | Close

_COMMANDS: Final = (Step, Sampling, Capture, Discard, Release, Resume, Close)
_MODES: Final[tuple[Mode, ...]] = ("prefill", "decode", "mixed")
_KINDS: Final[tuple[GraphKind, ...]] = ("decode", "decode_split", "head", "sample", "prefill")
_INT32, _INT64, _UINT64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint64)
_FLOAT32, _BOOL, _BYTE = np.dtype(np.float32), np.dtype(np.bool_), np.dtype(np.uint8)
_ALIGN = 8  # bytes
_ZEROS = bytes(_ALIGN)
_NUMBER = struct.Struct("<q")
_NONE = -1


class DecodeError(ValueError):
    """The bytes are no command."""


def encode(command: Command) -> bytes:
    """A command's bytes; equal commands have equal ones."""
    writer = _Writer()
    writer.number(_COMMANDS.index(type(command)))
    match command:
        case Step():
            _write_step(writer, command)
        case Sampling(seq, mask):
            writer.numbers(seq, 0 if mask is None else mask.shape[1])
            writer.array(None if mask is None else mask.reshape(-1))
        case Capture(key) | Discard(key):
            writer.numbers(_KINDS.index(key.kind), key.tokens, key.rows)
            writer.text(key.variant)
        case Release(tags) | Resume(tags):
            writer.number(sum(1 << MEMORY_TAGS.index(tag) for tag in tags))
        case Close():
            pass
    return writer.data()


def decode(data: bytes | bytearray) -> Command:
    """Its arrays are views into the data.

    Raises: DecodeError.
    """
    try:
        reader = _Reader(data)
        command = _read(reader)
    except ValueError as error:
        raise DecodeError(f"{len(data)} bytes are no command: {error}") from error
    if not reader.is_at_end:
        raise DecodeError(f"{len(data)} bytes hold more than a command")
    return command


def digest(step: Step, tokens: Int64s) -> int:
    """A number that differs, as good as surely, when the step or its tokens differ."""
    hashed = hashlib.blake2b(encode(step), digest_size=7)
    hashed.update(tokens.tobytes())
    return int.from_bytes(hashed.digest(), "little")


def _read(reader: _Reader) -> Command:
    kind = _COMMANDS[reader.index(len(_COMMANDS))]
    if kind is Step:
        return _read_step(reader)
    if kind is Sampling:
        seq, width = reader.number(), reader.number()
        mask = reader.array(_BOOL)
        return Sampling(seq, None if mask is None else mask.reshape(-1, width))
    if kind is Capture or kind is Discard:
        graph = _KINDS[reader.index(len(_KINDS))]
        return kind(GraphKey(graph, reader.number(), reader.number(), reader.text()))
    if kind is Release or kind is Resume:
        bits = reader.index(1 << len(MEMORY_TAGS))
        return kind(tuple(tag for i, tag in enumerate(MEMORY_TAGS) if bits >> i & 1))
    return Close()


def _write_step(writer: _Writer, step: Step) -> None:
    choice = step.choice
    shape = (_NONE, 0, 0) if choice is None else (choice.tokens, choice.rows, int(choice.replays))
    writer.numbers(step.seq, *shape, len(step.plans))
    for plan in step.plans:
        writer.number(_MODES.index(plan.mode))
        for array, dtype in (
            (plan.req_slot, _INT32), (plan.epoch, _INT32), (plan.q_len, _INT32),
            (plan.from_host, _BOOL), (plan.max_len, _INT32), (plan.samples, _BOOL),
            (plan.token_ids, _INT32),
        ):  # fmt: skip
            writer.array(array, dtype)
        writer.number(len(plan.page_updates))
        for name, update in plan.page_updates.items():
            writer.text(name)
            for array in (update.req_slot, update.index, update.page_id):
                writer.array(array, _INT32)
        init = plan.slot_init
        writer.array(None if init is None else init.req_slot, _INT32)
        if init is not None:
            writer.array(init.length, _INT32)
            writer.array(init.seed, _UINT64)
        _write_sampling(writer, plan.sampling)


def _write_sampling(writer: _Writer, sampling: SamplingBatch) -> None:
    writer.array(sampling.temperature, _FLOAT32)
    writer.number(int(sampling.all_greedy))
    writer.array(sampling.constrained, _BOOL)
    rows, ids = sampling.banned or (None, None)
    writer.array(rows, _INT64)
    if ids is not None:
        writer.array(ids, _INT64)


def _read_step(reader: _Reader) -> Step:
    seq, tokens, rows, replays, count = (reader.number() for _ in range(5))
    choice = None if tokens == _NONE else GraphChoice(tokens, rows, bool(replays))
    return Step(seq, tuple(_read_plan(reader) for _ in range(count)), choice)


def _read_plan(reader: _Reader) -> StepPlan:
    mode = _MODES[reader.index(len(_MODES))]
    req_slot, epoch, q_len = (reader.given(_INT32) for _ in range(3))
    from_host, max_len = reader.given(_BOOL), reader.given(_INT32)
    samples, token_ids = reader.given(_BOOL), reader.given(_INT32)
    updates = {
        reader.text(): PageTableUpdate(*(reader.given(_INT32) for _ in range(3)))
        for _ in range(reader.number())
    }
    slots = reader.array(_INT32)
    init = None
    if slots is not None:
        init = SlotInit(slots, reader.given(_INT32), reader.given(_UINT64))
    temperature, all_greedy = reader.given(_FLOAT32), bool(reader.number())
    constrained, banned_rows = reader.array(_BOOL), reader.array(_INT64)
    banned = None if banned_rows is None else (banned_rows, reader.given(_INT64))
    return StepPlan(
        mode, req_slot, epoch, q_len, from_host, max_len, samples, token_ids, updates, init,
        SamplingBatch(temperature, all_greedy, constrained, banned),
    )  # fmt: skip


class _Writer:
    """Numbers first, arrays after them: the reader takes all numbers in one go."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._parts: list[bytes] = []

    def number(self, value: int) -> None:
        self._numbers.append(value)

    def numbers(self, *values: int) -> None:
        self._numbers += values

    def array(self, array: npt.NDArray[Any] | None, dtype: np.dtype[Any] | None = None) -> None:
        """dtype: what the reader takes it for; None: bools or bytes as they are."""
        if array is None:
            self._numbers.append(_NONE)
            return
        if dtype is not None and array.dtype is not dtype:
            array = array.astype(dtype)
        data = array.tobytes()
        self._numbers.append(len(array))
        self._parts.append(data)
        if rest := len(data) % _ALIGN:
            self._parts.append(_ZEROS[rest:])

    def text(self, text: str) -> None:
        self.array(np.frombuffer(text.encode(), _BYTE))

    def data(self) -> bytes:
        count = len(self._numbers)
        head = struct.pack(f"<{count + 1}q", count, *self._numbers)
        return b"".join([head, *self._parts])


class _Reader:
    def __init__(self, data: bytes | bytearray) -> None:
        """Raises: DecodeError."""
        self._data = data
        try:
            (count,) = _NUMBER.unpack_from(data)
            self._place = _ALIGN * (count + 1)
            if not 0 < self._place <= len(data):
                raise DecodeError("they end early")
            self._numbers: Iterator[int] = iter(struct.unpack_from(f"<{count}q", data, _ALIGN))
        except struct.error as error:
            raise DecodeError(str(error)) from error

    @property
    def is_at_end(self) -> bool:
        return self._place == len(self._data) and next(self._numbers, None) is None

    def number(self) -> int:
        value = next(self._numbers, None)
        if value is None:
            raise DecodeError("they end early")
        return value

    def index(self, count: int) -> int:
        """Raises: DecodeError when it is not below count."""
        value = self.number()
        if not 0 <= value < count:
            raise DecodeError(f"{value} is not below {count}")
        return value

    def array(self, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
        count, start = self.number(), self._place
        if count == _NONE:
            return None
        size = count * dtype.itemsize
        if not 0 <= size <= len(self._data) - start:
            raise DecodeError("they end early")
        self._place += -(-size // _ALIGN) * _ALIGN
        found: npt.NDArray[Any] = np.frombuffer(self._data, dtype, count, start)
        return found

    def given(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        found = self.array(dtype)
        if found is None:
            raise DecodeError("an array is missing")
        return found

    def text(self) -> str:
        return self.given(_BYTE).tobytes().decode()
