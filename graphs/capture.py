"""Which graphs there are, which one a step runs in, and which one is captured next.

Knows buckets, counts and times; never a model or how a graph is made. `GraphTable` is written on
the launch thread and read from others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from treadle.graphs.backends import Body, CaptureError, Graph, GraphBackend
from treadle.graphs.buckets import Buckets, GraphKey, GraphKind
from treadle.graphs.step import GraphChoice, GraphReport, StepPlan

logger = logging.getLogger("treadle")

GB = 1 << 30
# Under load a capture may stall one step in so many, so that the 99th percentile does not see it...
STEPS_BETWEEN = 128
# ...or any step, while it takes at most this share of one.
HARMLESS_SHARE = 0.5

_ROW_KINDS: tuple[GraphKind, ...] = ("decode", "head", "sample", "decode_split")


class GraphTable:
    """Captured graphs by key. A prefill has one graph for each piece between two attentions."""

    def __init__(
        self,
        backend: GraphBackend,
        buckets: Buckets,
        parts: Callable[[GraphKey], Sequence[Body]],
        before_capture: Callable[[], None],
    ) -> None:
        """parts: the bodies of a key. before_capture: fills the buffers with padding."""
        self.backend = backend
        self.buckets = buckets
        self._parts = parts
        self._before_capture = before_capture
        self._graphs: dict[GraphKey, tuple[Graph, ...]] = {}
        self._confirmed: set[GraphKey] = set()

    def choose(self, plan: StepPlan) -> GraphChoice:
        """The padded shape of a step. Beyond the ladder it is the step's own shape, run eagerly."""
        rows = int(plan.samples.sum())
        bucket = self.buckets.rows_for(rows) if rows else 0
        if plan.mode == "decode":
            padded = rows if bucket is None else bucket
            choice = GraphChoice(padded, padded, False)
        else:
            tokens = self.buckets.tokens_for(plan.num_tokens)
            choice = GraphChoice(
                plan.num_tokens if tokens is None else tokens,
                rows if bucket is None else bucket,
                False,
            )
        keys = keys_of(plan, choice)
        replays = all(key in self._confirmed for key in keys)
        return GraphChoice(choice.tokens, choice.rows, replays)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._confirmed

    def replay(self, key: GraphKey, part: int = 0) -> None:
        self._graphs[key][part].replay()

    def capture(self, key: GraphKey) -> None:
        """Makes the graphs of a key; steps use them once they are confirmed.

        Raises: CaptureError; the key's steps go on running eagerly.
        """
        bodies = self._parts(key)
        if self.backend.needs_warm_up:
            self._before_capture()
            try:
                for body in bodies:
                    body()
                self.backend.synchronize()  # so that the capture's cost has the warm-up in it
            except Exception as error:
                raise CaptureError(f"its warm-up failed: {error}") from error
        try:
            self._graphs[key] = tuple(self.backend.capture(body) for body in bodies)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"{type(error).__name__}: {error}") from error

    def confirm(self, key: GraphKey) -> None:
        """Lets steps choose a key that every rank has captured; one that is gone stays so."""
        if key in self._graphs:
            self._confirmed.add(key)

    def discard(self, key: GraphKey) -> None:
        """Drops a key's graphs, if there are any."""
        self._confirmed.discard(key)
        self._graphs.pop(key, None)

    def clear(self) -> None:
        """Drops every graph."""
        self._confirmed = set()
        self._graphs = {}
        self.backend.clear()

    def report(self) -> GraphReport:
        confirmed = tuple(self._confirmed)  # the launch thread may be adding one
        captured = {
            "decode": tuple(sorted(key.rows for key in confirmed if key.kind == "decode")),
            "prefill": tuple(sorted(key.tokens for key in confirmed if key.kind == "prefill")),
        }
        planned = {
            "decode": len(self.buckets.decode_rows),
            "prefill": len(self.buckets.prefill_tokens),
        }
        return GraphReport(captured, planned, self.backend.num_bytes())


def keys_of(plan: StepPlan, choice: GraphChoice) -> tuple[GraphKey, ...]:
    """The graphs that a step of this shape replays, in order."""
    rows = choice.rows
    if plan.mode == "decode":
        if is_split(plan):
            return (GraphKey("decode_split", rows, rows), GraphKey("sample", rows, rows))
        return (GraphKey("decode", rows, rows),)
    forward = GraphKey("prefill", choice.tokens, 0)
    if not rows:
        return (forward,)
    return (forward, GraphKey("head", rows, rows), GraphKey("sample", rows, rows))


def is_split(plan: StepPlan) -> bool:
    """Whether something happens to the logits between the forward and sampling."""
    return plan.is_constrained or plan.sampling.banned is not None


def all_keys(buckets: Buckets) -> list[GraphKey]:
    """Everything that can be captured: the largest first, as they shape the shared memory, then
    from small to large, as small steps gain most.
    """
    rows, tokens = buckets.decode_rows, buckets.prefill_tokens
    ranked = [
        (place, order, GraphKey(kind, n, n))
        for order, kind in enumerate(_ROW_KINDS)
        for place, n in enumerate(rows)
    ]
    ranked += [(place, 2, GraphKey("prefill", n, 0)) for place, n in enumerate(tokens)]
    keys = [key for _, _, key in sorted(ranked)]
    first = [GraphKey("decode", n, n) for n in rows[-1:]]
    first += [GraphKey("prefill", n, 0) for n in tokens[-1:]]
    return list(dict.fromkeys(first + keys))


class BackgroundCapture:
    """Captures what steps have asked for, then everything else, when it disturbs nobody.

    While steps run, a capture must fit the budget, and either be short beside a step or come
    seldom. When the engine is idle it is done in any case.
    """

    def __init__(
        self,
        table: GraphTable,
        budget_ms: float,
        reserve_bytes: int | None,
        in_background: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """reserve_bytes: what graphs may take; None: no limit.

        in_background: False captures only what `first`, `one` and `capture` are called for.
        """
        self._table = table
        self._budget_ms = budget_ms
        self._reserve = reserve_bytes
        self._in_background = in_background
        self._clock = clock
        # how a capture comes about; over ranks it is a command, so that all capture in one order
        self.request: Callable[[GraphKey], None] = self.capture
        self.is_settled = threading.Event()  # unset while a requested capture has no outcome
        self.is_settled.set()
        self._asked: Counter[GraphKey] = Counter()
        self._cost_ms: dict[str, float] = {}  # of the last capture, by kind
        self._cost_bytes: dict[str, int] = {}
        self._steps_since = 0
        self.start()

    def start(self) -> None:
        """Plans all captures (again, after the graphs were dropped)."""
        self._left = {key: None for key in all_keys(self._table.buckets) if key not in self._table}
        self._seconds = {"decode": 0.0, "prefill": 0.0}

    def stop(self) -> None:
        """Plans nothing any more."""
        self._left = {}
        self._asked.clear()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to capture by itself, for now."""
        return not self._in_background or not self._left or not self.is_settled.is_set()

    @property
    def has_more(self) -> bool:
        """Whether anything is left, in the background or not."""
        return bool(self._left)

    def ask(self, keys: Sequence[GraphKey]) -> None:
        """A step ran eagerly for want of these."""
        self._asked.update(key for key in keys if key in self._left)

    def first(self) -> None:
        """Captures the largest decode bucket, before the engine is ready."""
        key = next(iter(self._left), None)
        if key is not None:
            self._log_begin()
            self.request(key)

    def one(self) -> None:
        """One of what is left, in the background or not."""
        key = next(iter(self._left), None)
        if key is not None:
            self.request(key)

    def when_idle(self) -> None:
        """One capture, whatever it takes."""
        key = None if self.is_done else self._next()
        if key is not None:
            self.request(key)

    def after_step(self, step_ms: float) -> None:
        """Perhaps one capture between two steps."""
        self._steps_since += 1
        if self.is_done:
            return
        key = next((key for key, _ in self._asked.most_common() if key in self._left), None)
        if key is None:
            return
        cost = self._cost_ms.get(key.kind, max(self._cost_ms.values(), default=0.0))
        is_seldom = self._steps_since >= STEPS_BETWEEN
        is_short = cost <= HARMLESS_SHARE * step_ms
        if cost <= self._budget_ms and self._budget_ms > 0 and (is_short or is_seldom):
            self.request(key)

    def capture(self, key: GraphKey) -> None:
        """Captures or gives the key up; never raises for what a body does."""
        if not self.begin(key):
            return
        try:
            self.run(key)
        except CaptureError as error:
            self.settle(key, error)
        else:
            self.settle(key, None)

    def begin(self, key: GraphKey) -> bool:
        """Takes the key off the list. Returns whether there is room for its graphs."""
        del self._left[key]
        del self._asked[key]
        self._steps_since = 0
        return key not in self._table and not self._is_too_large(key)

    def run(self, key: GraphKey) -> None:
        """Raises: CaptureError."""
        started, before = self._clock(), self._table.backend.num_bytes()
        self._table.capture(key)
        elapsed = self._clock() - started
        self._seconds[_phase(key)] += elapsed
        self._cost_ms[key.kind] = 1e3 * elapsed
        self._cost_bytes[key.kind] = self._table.backend.num_bytes() - before

    def settle(self, key: GraphKey, error: BaseException | None) -> None:
        """Lets steps use what was captured, or gives it up for the reason given."""
        if error is None:
            self._table.confirm(key)
        else:
            logger.warning("No graph for %s, such steps run eagerly: %s", key, error)
            self._table.discard(key)
            self._give_up(key.kind)
        if not any(_phase(other) == _phase(key) for other in self._left):
            self._report(_phase(key))

    def _give_up(self, kind: GraphKind) -> None:
        """What stops one size of a kind stops the others."""
        for key in [key for key in self._left if key.kind == kind]:
            del self._left[key]

    def _log_begin(self) -> None:
        for name, word in (("decode", "bs"), ("prefill", "num_tokens")):
            logger.info(
                "Capture target %s %s graph begin, in the background. %d sizes of %s.",
                name, self._device_word, self._table.report().planned[name], word,
            )  # fmt: skip

    @property
    def _device_word(self) -> str:
        return self._table.backend.name.removesuffix(" graph").upper()

    def _next(self) -> GraphKey | None:
        asked = (key for key, _ in self._asked.most_common() if key in self._left)
        return next(asked, next(iter(self._left), None))

    def _is_too_large(self, key: GraphKey) -> bool:
        expected = self._cost_bytes.get(key.kind, max(self._cost_bytes.values(), default=0))
        if self._reserve is None or self._table.backend.num_bytes() + expected <= self._reserve:
            return False
        logger.warning(
            "No more graphs: %d MB are taken, %d MB were set aside. %s and what else is missing "
            "runs eagerly; lower --cuda-graph-max-bs or --mem-fraction-static",
            self._table.backend.num_bytes() >> 20, self._reserve >> 20, key,
        )  # fmt: skip
        self._left = {}
        return True

    def _report(self, phase: str) -> None:
        report = self._table.report()
        word = "bs" if phase == "decode" else "num_tokens"
        logger.info(
            "Capture target %s %s graph end. %s=[%s], elapsed=%.2f s, mem usage=%.2f GB.",
            phase, self._device_word, word, ", ".join(map(str, report.captured[phase])),
            self._seconds[phase], report.num_bytes / GB,
        )  # fmt: skip


def _phase(key: GraphKey) -> str:
    return "prefill" if key.kind == "prefill" else "decode"
