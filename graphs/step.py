"""The boundary between host and device: what the host asks for in a step and what comes back.

Knows numpy only. Never a request, a token's text or a tensor: the host speaks in slots, pages and
token ids, the device owns last tokens, lengths and positions.

Axes: R rows of a plan, T host-supplied tokens of a plan, U page-table updates, I slot inits,
k tokens accepted by a row in one step (1 today).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

Mode = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One kind of KV memory. Page tables, allocation and locks are keyed by its name."""

    name: str
    page_size: int  # tokens
    pages: int
    bytes_per_page: int
    window: int | None = None  # tokens that a later query can still see; None: all of them
    kind: Literal["full", "window"] = "full"

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold, fixed at start-up."""

    groups: tuple[KvGroup, ...]
    slots: int  # requests that own device state at once
    max_model_len: int  # tokens of the longest sequence
    vocab_size: int  # rows of the embedding: every id below it is legal input


@dataclass(frozen=True, slots=True)
class PageTableUpdate:
    """Entries to write into one group's page table before the step reads it."""

    req_slot: Int32s  # [U]
    index: Int32s  # [U] page number within the sequence
    page_id: Int32s  # [U]


@dataclass(frozen=True, slots=True)
class SlotInit:
    """State of newly (re)admitted slots, written before the step reads it."""

    req_slot: Int32s  # [I]
    length: Int32s  # [I] tokens whose KV already stands in the slot's pages
    seed: UInt64s  # [I] folded: hash(request seed, choice index)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each row picks its token."""

    temperature: Float32s  # [R] 0 means the most likely token
    all_greedy: bool
    constrained: Bools | None = None  # [R] rows that wait for a mask; None: none do
    banned: tuple[Int64s, Int64s] | None = None  # rows and token ids that they may not draw, pairs


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One batch of work: a row per request."""

    mode: Mode
    req_slot: Int32s  # [R]
    epoch: Int32s  # [R] echoed to the host's bookkeeping, never read by the device
    q_len: Int32s  # [R] tokens this row computes
    from_host: Bools  # [R] True: the row's tokens stand in token_ids; False: the slot's last token
    max_len: Int32s  # [R] upper bound of the row's length after the step, in tokens
    samples: Bools  # [R] False for a chunk that is not the prompt's last
    token_ids: Int32s  # [T] the tokens of rows with from_host, in row order
    page_updates: dict[str, PageTableUpdate]  # by KvGroup name
    slot_init: SlotInit | None
    sampling: SamplingBatch

    @property
    def num_rows(self) -> int:
        return len(self.req_slot)

    @property
    def num_tokens(self) -> int:
        return int(self.q_len.sum())

    @property
    def is_constrained(self) -> bool:
        return self.sampling.constrained is not None and bool(self.sampling.constrained.any())


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """The padded shape that a step runs in; chosen once, followed on every rank."""

    tokens: int  # of the forward, padding included
    rows: int  # rows that sample, padding included
    replays: bool  # captured graphs run it; else the same code, eagerly


@dataclass(frozen=True, slots=True)
class Step:
    """A command: run the plans. One plan per attention-data-parallel group, one group today."""

    seq: int  # position in the one ordered command sequence
    plans: tuple[StepPlan, ...]
    choice: GraphChoice | None = None  # the executor's, made at launch

    @property
    def plan(self) -> StepPlan:
        return self.plans[0]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced. Rows stand in the plan's order."""

    seq: int
    token_ids: Int32s  # [R, k]; undefined beyond num_accepted
    num_accepted: Int32s  # [R] 0 for a row that does not sample
    device_ms: float
    replayed: bool = False  # captured graphs ran it


class StepHandle(Protocol):
    """A launched step."""

    @property
    def seq(self) -> int: ...

    def __await__(self) -> Generator[Any, None, StepResult]:
        """The result, or what the step raised. May be awaited more than once."""

    def done(self) -> bool:
        """Whether awaiting it would return or raise at once."""

    def sample(self, mask: Bools | None) -> None:
        """Lets a constrained plan sample; called exactly once, also when the mask failed.

        mask: [R, V] True where a token is allowed, None for no restriction.
        Raises: RuntimeError for an unconstrained plan or a second call.
        """


MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True)
class GraphReport:
    """How far capture is. Phases: `decode`, `prefill`."""

    captured: Mapping[str, tuple[int, ...]]  # buckets, in rows or tokens
    planned: Mapping[str, int]  # buckets that there will be
    num_bytes: int  # that graphs take


class Executor(Protocol):
    """Consumes one ordered sequence of commands. Called from the event loop's thread only."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def depth(self) -> int:
        """Steps that may be in flight."""

    def launch(self, step: Step) -> StepHandle:
        """Queues a step and returns at once.

        Raises: RuntimeError when seq is out of order, `depth` steps are in flight, the previous
        step still waits for its mask, or the device is lost.
        """

    async def release(self, tags: Collection[MemoryTag]) -> None:
        """Gives memory back to the system after what is queued; addresses stay.

        No step may be launched until it is resumed. KV contents are lost.
        Raises: RuntimeError when the device cannot, naming the flag that makes it able.
        """

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        """Takes the memory again; weights are read from the checkpoint, graphs captured anew."""

    def graphs(self) -> GraphReport:
        """What is captured now."""

    async def close(self) -> None:
        """Finishes what is queued and releases the device. Idempotent."""

    def is_alive(self) -> bool:
        """Whether the launch thread still takes commands."""
