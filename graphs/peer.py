"""One other rank: its stream, its process, and what it says.

Knows bytes and reports; never what a command does.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

from treadle.graphs.rendezvous import Frames

WORKER: Final = (sys.executable, "-P", "-m", "treadle.graphs.rank_main")  # a rank's program


class RankError(RuntimeError):
    """A rank could not start, has failed, hangs or is gone; the others cannot go on."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a follower says: joined, loaded (bytes free), ready, answer (text: an error), alive
    (started, finished), finished (seq, digest), failed (text: why).
    """

    what: str
    text: str = ""
    numbers: tuple[int, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps([self.what, self.text, self.numbers]).encode()

    @classmethod
    def from_json(cls, data: bytes | bytearray) -> Report:
        what, text, numbers = json.loads(data)
        return cls(what, text, tuple(numbers))


class Observer(Protocol):
    """Told on the reading thread."""

    def reported(self, rank: int, report: Report) -> None: ...

    def tick(self) -> None:
        """Called several times a second."""

    def lost(self, error: RankError) -> None: ...


@dataclass(slots=True)
class Peer:
    rank: int
    stream: socket.socket
    process: subprocess.Popen[bytes] | None
    device: str
    frames: Frames = field(default_factory=Frames)
    waiting: deque[memoryview] = field(default_factory=deque)  # bytes that the stream did not take
    lock: threading.Lock = field(default_factory=threading.Lock)
    said: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the last numbers, by report
    heard: float = field(default_factory=time.monotonic)
    is_gone: bool = False

    def send(self, data: bytes) -> bool:
        """At once, as far as the stream takes it. Returns whether something is left over."""
        with self.lock:
            if not self.waiting:
                try:
                    data = data[self.stream.send(data) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return False  # the reader finds the stream's end
            if data:
                self.waiting.append(memoryview(data))
            return bool(data)

    def flush(self) -> bool:
        """Returns whether something is still left over."""
        with self.lock:
            while self.waiting:
                try:
                    sent = self.stream.send(self.waiting[0])
                except BlockingIOError:
                    break
                except OSError:
                    self.waiting.clear()
                    break
                rest = self.waiting[0][sent:]
                self.waiting.popleft()
                if len(rest):
                    self.waiting.appendleft(rest)
            return bool(self.waiting)
