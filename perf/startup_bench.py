"""From the start of a server process to its first answer, and what capture has done by then.

Each way of capturing gets a process of its own, in turns; figures are medians over the rounds.
Knows the server's HTTP API only. `python -m treadle.perf.startup_bench [MODEL] [--json]`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import IO, Any

import psutil

from treadle.tools.model_source import resolve_model

WAYS: dict[str, tuple[str, ...]] = {
    "in the background (default)": (),
    "all before readiness (`--warmup-graphs`)": ("--warmup-graphs",),
    "none (`--disable-cuda-graph`)": ("--disable-cuda-graph",),
}
POLL_S = 0.02  # the server answers 503 meanwhile, on a core that it loads the model with
GIVE_UP_S = 300.0
SETTLE_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Start:
    """One server's start. Seconds since its process was asked for, where not said otherwise."""

    ready_s: float  # /health answers 200
    ready_cpu_s: float  # of all the server's threads by then, whoever else kept the machine busy
    first_token_s: float
    answered_s: float  # the first request's last token
    startup_s: dict[str, float]  # the server's own report
    startup_time: float
    graphs_then: int  # captured when the first answer had come
    captured_s: float | None  # when all were; None: not within the time allowed
    graphs_later: int
    graphs_planned: int
    first_answer_s: float  # the first request alone
    later_answer_s: float  # one just like it, after capture


class Server:
    """`treadle serve` in a child process."""

    def __init__(self, command: Sequence[str], port: int, log: IO[bytes]) -> None:
        self.started = time.perf_counter()
        self._port = port
        self._log = log
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def cpu_s(self) -> float:
        used = psutil.Process(self.process.pid).cpu_times()
        return float(used.user + used.system)

    def wait_ready(self) -> float:
        while self.elapsed() < GIVE_UP_S:
            if self.process.poll() is not None:
                break
            try:
                if self._get("/health")[0] == 200:
                    return self.elapsed()
            except OSError:
                pass
            time.sleep(POLL_S)
        self._log.seek(0)
        raise RuntimeError(f"the server did not start: {self._log.read()[-2000:].decode()}")

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._get("/server_info")[1])
        return found

    def generate(self, prompt: Sequence[int], count: int) -> tuple[float, float]:
        """When the first and the last token had come."""
        params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True})
        connection = self._connect()
        try:
            connection.request("POST", "/generate", body)
            answer = connection.getresponse()
            first = answer.readline()
            first_s = self.elapsed()
            rest = answer.read()
        finally:
            connection.close()
        if not first.startswith(b"data: {") or not rest.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"no stream but {(first + rest)[:200]!r}")
        return first_s, self.elapsed()

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=GIVE_UP_S)


@contextmanager
def serving(model: str, flags: Sequence[str]) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "treadle.tools.cli", "serve", model, "--port", str(port),
               *flags]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        server = Server(command, port, log)
        try:
            yield server
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.process.wait()


def measure(model: str, flags: Sequence[str], options: argparse.Namespace) -> Start:
    rng = random.Random(options.seed)
    first, later = ([rng.randrange(100, 10_000) for _ in range(options.input_len)] for _ in "12")
    with serving(model, flags) as server:
        ready, ready_cpu = server.wait_ready(), server.cpu_s()
        first_token, answered = server.generate(first, options.output_len)
        info = server.info()
        planned = sum(info["graphs"]["planned"].values())
        captured = _settle(server, planned, options.settle_s)
        settled = server.info()
        asked = server.elapsed()
        _, answered_later = server.generate(later, options.output_len)
    return Start(
        ready, ready_cpu, first_token, answered, info["startup_s"], info["startup_time"],
        _captured(info), captured, _captured(settled), planned,
        answered - ready, answered_later - asked,
    )  # fmt: skip


def _settle(server: Server, planned: int, settle_s: float) -> float | None:
    """When all graphs were there, waiting for it at most so long."""
    deadline = server.elapsed() + settle_s
    while _captured(server.info()) < planned:
        if server.elapsed() > deadline:
            return None
        time.sleep(SETTLE_POLL_S)
    return server.elapsed()


def _captured(info: dict[str, Any]) -> int:
    return sum(map(len, info["graphs"]["captured"].values()))


def medians(starts: Sequence[Start]) -> Start:
    """Field by field; phase by phase for the report."""
    found = {each.name: _median([getattr(s, each.name) for s in starts]) for each in fields(Start)}
    phases = starts[0].startup_s
    found["startup_s"] = {name: median(s.startup_s[name] for s in starts) for name in phases}
    return Start(**found)


def _median(values: Sequence[Any]) -> Any:
    kept = [value for value in values if value is not None]
    if len(kept) < len(values) or isinstance(values[0], dict):
        return None
    return median(kept)


def table(found: dict[str, Start]) -> str:
    """Markdown, one way of capturing a row."""
    columns: dict[str, Callable[[Start], str]] = {
        "ready, s": lambda s: f"{s.ready_s:.2f}",
        "CPU by then, s": lambda s: f"{s.ready_cpu_s:.2f}",
        "first token, s": lambda s: f"{s.first_token_s:.2f}",
        "first answer, s": lambda s: f"{s.answered_s:.2f}",
        "graphs by then": lambda s: f"{s.graphs_then:.0f} of {s.graphs_planned:.0f}",
        "all captured, s": _captured_when,
        "first answer alone, s": lambda s: f"{s.first_answer_s:.2f}",
        "the like later, s": lambda s: f"{s.later_answer_s:.2f}",
    }
    rows = [["graphs", *columns], ["---"] * (1 + len(columns))]
    rows += [[way, *(show(start) for show in columns.values())] for way, start in found.items()]
    reports = [
        f"{way}: start-up {start.startup_time:.2f} s in the medians: "
        + ", ".join(f"{name} {seconds:.2f}" for name, seconds in start.startup_s.items())
        for way, start in found.items()
    ]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + ["", *reports])


def _captured_when(start: Start) -> str:
    if not start.graphs_planned:
        return "–"
    if start.captured_s is None:
        return f"{start.graphs_later:.0f} at the end"
    return f"{start.captured_s:.1f}"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="treadle.perf.startup_bench", description=__doc__)
    parser.add_argument("model", nargs="?", help="default: the embedded model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--settle-s", type=float, default=60.0,
                        help="how long the rest of the graphs is waited for")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="every start as JSON, no table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    model = str(resolve_model(options.model).path)
    starts: dict[str, list[Start]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for number in range(options.rounds):
        first = number % len(ways)  # each way comes first, second and last as often
        for way in ways[first:] + ways[:first]:
            starts[way].append(measure(model, WAYS[way], options))
    if options.json:
        print(json.dumps({way: [asdict(s) for s in each] for way, each in starts.items()}))
    else:
        print(table({way: medians(each) for way, each in starts.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
