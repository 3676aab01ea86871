"""One choice of one request while the engine works on it. Knows no policy, page pool or device.

Few integers are stored, the rest is derived; their order is checked in one place:
0 <= num_cached <= num_computed <= num_scheduled <= len(token_ids) + num_in_flight.
"""

from __future__ import annotations

import time
from enum import Enum

from treadle.engine.output import FinishReason, Sink
from treadle.engine.sampling_params import SamplingParams
from treadle.engine.text_stream import TextStream


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Mutable; owned by the scheduler from submission to its last delta."""

    __slots__ = (
        "arrival", "epoch", "finish_reason", "first_token", "index", "is_abort_wanted", "max_len",
        "num_cached", "num_computed", "num_in_flight", "num_prefill", "num_reported",
        "num_scheduled", "pages", "params", "pending_text", "prompt_len", "request_id", "seed",
        "sink", "slot", "status", "stop_ids", "stream_interval", "text", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_ids: list[int],
        max_len: int,
        params: SamplingParams,
        *,
        seed: int,
        stop_ids: frozenset[int],
        text: TextStream | None,
        stream_interval: int,
        sink: Sink,
    ) -> None:
        """max_len: tokens at which the sequence ends, prompt included.
        stop_ids: token ids that end it.
        text: turns its tokens into text; None when there is no tokenizer.
        stream_interval: generated tokens per delta, after the first.
        """
        self.request_id = request_id
        self.index = index
        self.token_ids = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.max_len = max_len
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.text = text
        self.stream_interval = stream_interval
        self.sink = sink
        self.arrival = time.monotonic()
        self.first_token: float | None = None
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.is_abort_wanted = False
        self.epoch = 0  # rows launched under an older epoch are dropped
        self.slot = -1
        self.pages: dict[str, list[int]] = {}  # by KV group
        self.num_cached = 0  # prompt tokens whose KV was there at admission
        self.num_computed = 0  # tokens whose KV is known to be written
        self.num_scheduled = 0  # tokens whose KV is written or planned
        self.num_in_flight = 0  # tokens to be sampled by launched steps
        self.num_prefill = len(prompt_ids)  # tokens known at admission
        self.num_reported = 0  # generated tokens that went out
        self.pending_text = ""  # text found in `update`, not yet out

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
    def worst_case_tokens(self) -> int:
        """KV positions it can ever need: the last token's KV is never read."""
        return max(self.max_len - 1, self.prompt_len)

    def check(self) -> None:
        """Raises: AssertionError when the counts contradict each other."""
        counts = (0, self.num_cached, self.num_computed, self.num_scheduled,
                  len(self.token_ids) + self.num_in_flight)  # fmt: skip
        assert all(a <= b for a, b in zip(counts, counts[1:], strict=False)), (
            f"{self.request_id}: {counts}"
        )
