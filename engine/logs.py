"""Every periodic log line in one place, in SGLang's wording so that its log parsers work.

Knows counts and rates only.
"""

from __future__ import annotations

import logging
import time

from treadle.engine.info import EngineLoad
from treadle.engine.planner import Launch
from treadle.engine.scheduler import Scheduler
from treadle.graphs.step import GraphReport

logger = logging.getLogger("treadle")


class StepLog:
    """Prints a line per prefill step and one per `decode_log_interval` decode steps."""

    def __init__(self, scheduler: Scheduler, decode_log_interval: int, graph_label: str) -> None:
        """graph_label: `cpu graph` or `cuda graph`."""
        self.gen_throughput = 0.0  # tokens a second, as of the last decode line
        self._scheduler = scheduler
        self._interval = decode_log_interval
        self._graph_label = graph_label
        self._decode_steps = 0
        self._generated = 0
        self._last_prefill = self._last_decode = time.perf_counter()

    def step(self, launch: Launch, num_generated: int, replayed: bool) -> None:
        """num_generated: tokens that the step sampled. replayed: captured graphs ran it."""
        self._generated += num_generated
        if launch.num_prefill_tokens:
            self._prefill(launch, replayed)
        if launch.num_decode_rows:
            self._decode_steps += 1
            if self._decode_steps % self._interval == 0:
                self._decode(launch, replayed)

    def idle(self) -> None:
        """The next interval starts when work comes again."""
        self._last_prefill = self._last_decode = time.perf_counter()
        self._generated = 0

    def _usage(self) -> float:
        pages = self._scheduler.pages
        return pages.num_used_tokens / pages.max_tokens

    def _prefill(self, launch: Launch, replayed: bool) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        now = time.perf_counter()
        rate = launch.num_prefill_tokens / max(now - self._last_prefill, 1e-9)
        self._last_prefill = now
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, #pending-token: %d, %s: %s, "
            "input throughput (token/s): %.2f",
            launch.num_new_requests, launch.num_prefill_tokens, launch.num_cached_tokens,
            self._usage(), launch.num_running, len(self._scheduler.waiting),
            self._scheduler.num_pending_tokens, self._graph_label, replayed, rate,
        )  # fmt: skip

    def _decode(self, launch: Launch, replayed: bool) -> None:
        """replayed: the last step of the interval."""
        now = time.perf_counter()
        self.gen_throughput = self._generated / max(now - self._last_decode, 1e-9)
        self._last_decode, self._generated = now, 0
        logger.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, %s: %s, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            launch.num_decode_rows, self._scheduler.pages.num_used_tokens, self._usage(),
            self._graph_label, replayed, self.gen_throughput, len(self._scheduler.waiting),
        )  # fmt: skip


def engine_load(scheduler: Scheduler, gen_throughput: float, graphs: GraphReport) -> EngineLoad:
    """The same counts for whoever asks."""
    used, pending = scheduler.pages.num_used_tokens, scheduler.num_pending_tokens
    return EngineLoad(
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=len(scheduler.waiting),
        num_waiting_uncached_tokens=pending,
        num_used_tokens=used,
        num_total_tokens=used + pending,
        max_total_num_tokens=scheduler.pages.max_tokens,
        last_gen_throughput=gen_throughput,
        graphs=graphs,
    )
