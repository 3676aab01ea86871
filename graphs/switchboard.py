"""Streams to all other ranks on one thread: it starts processes, reads, and judges who lives.

Knows bytes, reports and processes; never what a frame does. A child dies with the thread that
started it, so that this one lives longest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from treadle.graphs.peer import Observer, Peer, RankError, Report
from treadle.graphs.rank_plan import Layout, RankPlan
from treadle.graphs.rendezvous import Kind, Listener, frame, make_pair

logger = logging.getLogger("treadle")

TICK_S: Final = 0.1
GRACE_S: Final = 0.2  # after the first sign of a loss, for the one that explains it
CLOSE_S: Final = 2.0  # for a process to end by itself
_READ: Final = 1 << 16  # bytes at once


class Switchboard:
    """The processes and streams of all ranks but this one."""

    def __init__(
        self,
        layout: Layout,
        plan: RankPlan,
        kind: str,
        command: Sequence[str],
        listener: Listener | None,
    ) -> None:
        """listener: for ranks that are not started here."""
        self.peers: dict[int, Peer] = {}
        self._layout = layout
        self._plan = plan
        self._kind = kind
        self._command = command
        self._listener = listener
        self._observer: Observer | None = None
        self._signs: list[tuple[int | None, str]] = []  # rank and what it said: "" if nothing
        self._signs_since = 0.0
        self._loss: RankError | None = None
        self._is_closing = False
        self._ends_at = math.inf  # whoever has not left by then is left
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="treadle-ranks", daemon=True)
        self._thread.start()

    def send(self, data: bytes) -> None:
        """A frame to all; does not block."""
        if any([peer.send(data) for peer in self.peers.values()]):
            self._wake()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Until a report makes the condition true, or time is over. Raises: RankError."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._loss or condition(), timeout_s)
        if self._loss is not None:
            raise self._loss
        return bool(came)

    def look_again(self) -> None:
        """Something else than a report may have made a condition true."""
        with self._changed:
            self._changed.notify_all()

    def observe(self, observer: Observer) -> None:
        with self._changed:
            self._observer = observer
            if self._loss is None:
                return
        observer.lost(self._loss)

    def fail(self, rank: int | None, reason: str) -> None:
        with self._changed:
            if not self._signs:
                self._signs_since = time.monotonic()
            self._signs.append((rank, reason))
        self._wake()

    def close(self, last: bytes | None) -> None:
        """Ends all processes. last: a frame that lets them end by themselves; None: at once."""
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            return
        is_orderly = last is not None and self._loss is None
        self._ends_at = time.monotonic() + (CLOSE_S if is_orderly else 0.0)
        if last is not None and is_orderly:
            self.send(last)
            self._reap(CLOSE_S)
        self._kill()
        self._wake()
        self._thread.join(CLOSE_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    def _run(self) -> None:
        # processes inherit it: one that still imports would die of a signal to the whole group
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._serve()
        except Exception as error:  # nobody else would notice that a rank is lost
            logger.exception("The thread that reads from the ranks has failed")
            self._declare(RankError(f"the ranks cannot be heard any more: {error}"))
        self._kill()
        self._reap(CLOSE_S)
        for peer in self.peers.values():
            peer.stream.close()  # ends those that were not started here
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        for each in (self._wake_in, self._wake_out):
            each.close()

    def _serve(self) -> None:
        for rank in self._layout.spawned:
            self._spawn(rank)
        while not self._is_at_end:
            for key, events in self._selector.select(TICK_S):
                if key.fileobj is self._wake_out:
                    self._wake_out.recv(_READ)
                elif self._listener is not None and key.fileobj is self._listener:
                    self._accept()
                elif events & selectors.EVENT_READ:
                    self._read(key.data)
            self._watch_writes()
            self._judge()
            if self._observer is not None and self._loss is None:
                self._observer.tick()
            elif self._observer is None:
                self._look_for_silence()
            if self._loss is not None and time.monotonic() > self._signs_since + CLOSE_S:
                self._kill()

    @property
    def _is_at_end(self) -> bool:
        is_over = time.monotonic() > self._ends_at
        return is_over or self._is_closing and all(peer.is_gone for peer in self.peers.values())

    def _look_for_silence(self) -> None:
        """While ranks start, which may take as long as it likes where a rank still beats."""
        for peer in self.peers.values():
            silence = time.monotonic() - peer.heard
            if "joined" in peer.said and silence > self._plan.timeout_s:
                self.fail(None, f"rank {peer.rank} has not been heard of for {silence:.1f} s")

    def _spawn(self, rank: int) -> None:
        ours, theirs = make_pair()
        process = subprocess.Popen(
            [*self._command, "--fd", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else None,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._add(Peer(rank, ours, process, self._layout.device(self._kind, rank)))

    def _accept(self) -> None:
        assert self._listener is not None
        for rank, device, stream in self._listener.accept():
            if rank in self.peers or not 0 < rank < self._layout.size:
                stream.close()
            else:
                self._add(Peer(rank, stream, None, device))
        if len(self.peers) == self._layout.size - 1:  # nobody else has any business here
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _add(self, peer: Peer) -> None:
        peer.stream.setblocking(False)
        self._selector.register(peer.stream, selectors.EVENT_READ, peer)
        with self._changed:
            self.peers[peer.rank] = peer
        peer.send(frame(Kind.PLAN, self._plan.for_rank(peer.rank, peer.device).to_json()))

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.stream.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(peer.stream)
            peer.stream.close()
            peer.is_gone = True
            if not self._is_closing and all(rank != peer.rank for rank, _ in self._signs):
                self.fail(peer.rank, "")
            return
        peer.heard = time.monotonic()
        for _, payload in peer.frames.feed(data):
            self._take(peer, Report.from_json(payload))

    def _take(self, peer: Peer, report: Report) -> None:
        with self._changed:
            peer.said[report.what] = report.numbers
            self._changed.notify_all()
        if report.what == "failed":
            self.fail(peer.rank, report.text)
        elif self._observer is not None:
            self._observer.reported(peer.rank, report)

    def _watch_writes(self) -> None:
        for peer in self.peers.values():
            if not peer.is_gone:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.flush() else 0)
                self._selector.modify(peer.stream, events, peer)

    def _judge(self) -> None:
        """Declares the loss, a moment after its first sign."""
        is_time = self._signs and time.monotonic() > self._signs_since + GRACE_S
        if self._loss is not None or not is_time:
            return
        self._declare(RankError(self._reason()))

    def _declare(self, loss: RankError) -> None:
        with self._changed:
            self._loss = loss
            observer = self._observer
            self._changed.notify_all()
        if not self._is_closing and observer is not None:
            observer.lost(loss)

    def _reason(self) -> str:
        """A rank that died without a word explains the errors of the others."""
        silent = [rank for rank, text in self._signs if rank is not None and not text]
        if silent:
            return "; ".join(f"rank {rank} {self._how_it_ended(rank)}" for rank in silent)
        # rank 0 mostly sees what the failure of another one leads to
        first, text = max(self._signs, key=lambda sign: sign[0] != 0)
        if first is None:
            return text
        ranks = sorted({rank for rank, said in self._signs if said == text and rank is not None})
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"

    def _how_it_ended(self, rank: int) -> str:
        process = self.peers[rank].process
        if process is None:
            return "is gone: its connection ended"
        try:
            code = process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        peers = list(self.peers.values())  # the thread may be adding one
        return [peer.process for peer in peers if peer.process is not None]

    def _reap(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
