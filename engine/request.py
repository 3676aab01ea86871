"""One choice of one request while the engine works on it. Knows no policy, page pool or device.

Few integers are stored, the rest is derived; their order is checked in one place:
0 <= num_cached <= num_computed <= num_scheduled <= len(token_ids) + num_in_flight.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from treadle.engine.output import FinishReason, Sink
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.text_stream import TextStream


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Mutable; owned by the scheduler from submission to its last delta."""

    request_id: str
    index: int  # choice
    token_ids: array[int]  # int32: the prompt, then what was generated
    max_len: int  # tokens at which the sequence ends, prompt included
    params: SamplingParams
    seed: int  # folded with the choice index
    stop_ids: frozenset[int]  # token ids that end it
    text: TextStream | None  # turns its tokens into text; None when there is no tokenizer
    stream_interval: int  # generated tokens per delta, after the first
    sink: Sink
    priority: int | None = None
    routing_key: str | None = None
    namespace: Hashable = None  # requests of different ones never share KV

    prompt_len: int = field(init=False)
    num_prefill: int = field(init=False)  # tokens known at admission
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    is_abort_wanted: bool = False
    importance: int = 0  # more is more; the same for all without priorities
    arrival_order: int = 0  # rises with every submission; survives retraction
    num_retractions: int = 0
    epoch: int = 0  # rows launched under an older epoch are dropped
    slot: int = -1
    pages: dict[str, array[int]] = field(default_factory=dict)  # by KV group
    node: Any = None  # the prefix tree's node that this request has locked
    num_shared: int = 0  # leading tokens whose pages belong to the tree
    num_cached: int = 0  # tokens whose KV was there at the last admission
    num_cached_prompt: int = 0  # prompt tokens whose KV was there at the first admission
    num_computed: int = 0  # tokens whose KV is known to be written
    num_scheduled: int = 0  # tokens whose KV is written or planned
    num_in_flight: int = 0  # tokens to be sampled by launched steps
    num_reported: int = 0  # generated tokens that went out
    pending_text: str = ""  # text found in `update`, not yet out

    def __post_init__(self) -> None:
        self.prompt_len = self.num_prefill = len(self.token_ids)

    def restart(self) -> None:
        """Back to waiting, with what it has generated; its KV has to be found or made again.

        Tokens in flight are still to come: only then may it run again.
        """
        self.status = Status.WAITING
        self.num_retractions += 1
        self.num_computed = self.num_scheduled = self.num_cached = 0

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled < self.num_prefill

    @property
    def may_sample(self) -> bool:
        """Whether one more token fits, counting those that launched steps will bring."""
        return len(self.token_ids) + self.num_in_flight < self.max_len

    @property
    def num_left(self) -> int:
        """Tokens it may still generate, those in flight counted as generated."""
        return self.max_len - len(self.token_ids) - self.num_in_flight

    def check(self) -> None:
        """Raises: AssertionError when the counts contradict each other."""
        counts = (0, self.num_cached, self.num_computed, self.num_scheduled,
                  len(self.token_ids) + self.num_in_flight)  # fmt: skip
        assert all(a <= b for a, b in zip(counts, counts[1:], strict=False)), (
            f"{self.request_id}: {counts}"
        )
