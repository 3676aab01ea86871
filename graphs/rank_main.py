"""A rank other than 0: gets its part of the model, then runs the commands that rank 0 sends.

Knows commands and one device; never a request, a result's reader or the event loop. Started by
rank 0 as `python -m treadle.graphs.rank_main --fd N`; on other nodes and by torchrun it joins.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from treadle.graphs.command_codec import (
    Capture,
    Close,
    Command,
    Discard,
    Release,
    Resume,
    Sampling,
    decode,
    digest,
)
from treadle.graphs.device import Event
from treadle.graphs.executor import DeviceExecutor, occupy
from treadle.graphs.peer import WORKER, Report
from treadle.graphs.rank_model import Rank, load_rank
from treadle.graphs.rank_plan import Allocation, Layout, RankPlan
from treadle.graphs.rendezvous import (
    Address,
    Channel,
    Kind,
    connect_group,
    connect_to_leader,
    open_store,
)
from treadle.graphs.runner import Forwarded
from treadle.graphs.step import Step

logger = logging.getLogger("treadle")

Load = Callable[[RankPlan, dist.ProcessGroup], Rank]

LINGER_S = 0.5  # after a failed step: the other ranks' errors, once this one is gone, explain less
NODE_GRACE_S = 10.0  # for a node's ranks to end after the first of them

_PR_SET_PDEATHSIG = 1  # prctl(2)
_Finished = tuple[Step, Forwarded, Event]


class Follower:
    """Runs commands in their order, on one thread."""

    def __init__(self, channel: Channel, plan: RankPlan) -> None:
        self._channel = channel
        self._plan = plan
        self._seqs = [0, 0]  # of the last step started and finished
        self._forwarded: tuple[Step, Forwarded] | None = None  # constrained, not yet sampled
        self._finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()

    def run(self, load: Load) -> int:
        """Returns the process's exit code."""
        self._start("treadle-heartbeat", self._beat)
        try:
            executor = self._prepare(load)
        except EOFError:
            return 1
        except Exception as error:
            logger.debug("This rank cannot start", exc_info=True)
            return self._fail(f"cannot start: {error}")
        if not executor.device.is_host:
            self._start("treadle-wait", lambda: self._wait(executor))
        try:
            while not isinstance(command := self._next(), Close):
                self._do(executor, command)
        except EOFError:  # rank 0 is gone
            return 1
        except Exception as error:
            logger.error("Step %d failed", self._seqs[0], exc_info=error)
            self._fail(f"step {self._seqs[0]} failed: {type(error).__name__}: {error}")
            time.sleep(LINGER_S)
            return 1
        return 0

    def _prepare(self, load: Load) -> DeviceExecutor:
        plan = self._plan
        if plan.num_threads is not None:
            torch.set_num_threads(plan.num_threads)
        self._report("joined")
        self._expect(Kind.CONNECT)
        device = torch.device(plan.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = open_store(Address.parse(plan.store), is_master=False, timeout_s=plan.timeout_s)
        group = connect_group(store, plan.rank, plan.size, device, plan.timeout_s)
        rank = load(plan, group)
        self._report("loaded", numbers=(rank.free_bytes(),))
        executor = rank.allocate(Allocation.from_json(self._expect(Kind.ALLOCATE)))
        executor.device.enter_thread()
        self._report("ready")
        return executor

    def _expect(self, kind: Kind) -> bytearray:
        found, payload = self._channel.receive()
        if found != kind:  # rank 0 has given up
            raise EOFError(f"{found.name} instead of {kind.name}")
        return payload

    def _next(self) -> Command:
        return decode(self._expect(Kind.COMMAND))

    def _do(self, executor: DeviceExecutor, command: Command) -> None:
        match command:
            case Step():
                self._seqs[0] = command.seq
                forwarded = executor.runner.forward(command)
                if command.plan.is_constrained:
                    self._forwarded = command, forwarded
                else:
                    event = executor.runner.sample(command, forwarded, None)
                    self._end(executor, command, forwarded, event)
            case Sampling(seq, mask):
                assert self._forwarded is not None and self._forwarded[0].seq == seq
                step, forwarded = self._forwarded
                self._forwarded = None
                self._end(executor, step, forwarded, executor.runner.sample(step, forwarded, mask))
            case Capture(key):
                self._answer(partial(executor.runner.graphs.capture, key))
                executor.runner.graphs.confirm(key)  # rank 0 chooses; what is here may be replayed
            case Discard(key):
                executor.runner.graphs.discard(key)
            case Release() | Resume():
                assert executor.occupation is not None
                self._answer(partial(occupy, executor.device, executor.occupation, command))

    def _answer(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # rank 0 hears of it and decides
            self._report("answer", str(error) or type(error).__name__)
        else:
            self._report("answer")

    def _end(self, executor: DeviceExecutor, step: Step, done: Forwarded, event: Event) -> None:
        if executor.device.is_host:
            self._take(executor, step, done, event)
        else:
            self._finished.put((step, done, event))

    def _wait(self, executor: DeviceExecutor) -> None:
        while True:
            self._take(executor, *self._finished.get())

    def _take(self, executor: DeviceExecutor, step: Step, done: Forwarded, event: Event) -> None:
        event.wait()
        self._seqs[1] = step.seq
        if self._plan.is_debug:
            tokens = executor.runner.take(step.seq, done)
            self._report("finished", numbers=(step.seq, digest(step, tokens)))

    def _beat(self) -> None:
        """Tells that the process lives, and ends it when nobody listens any more."""
        pause = threading.Event()
        while not pause.wait(self._plan.heartbeat_s):
            try:
                self._report("alive", numbers=(self._seqs[0], self._seqs[1]))
            except OSError:
                os._exit(1)

    def _report(self, what: str, text: str = "", numbers: tuple[int, ...] = ()) -> None:
        self._channel.send(Kind.REPORT, Report(what, text, numbers).to_json())

    def _fail(self, reason: str) -> int:
        with contextlib.suppress(OSError):
            self._report("failed", reason)
        return 1

    @staticmethod
    def _start(name: str, call: Callable[[], None]) -> None:
        threading.Thread(target=call, name=name, daemon=True).start()


def follow(stream: socket.socket, load: Load = load_rank) -> int:
    """Serves rank 0 at the other end of a stream. Returns the process's exit code."""
    channel = Channel(stream)
    try:
        kind, payload = channel.receive()
    except EOFError:
        return 1
    assert kind is Kind.PLAN
    plan = RankPlan.from_json(payload)
    logging.basicConfig(
        level=plan.log_level.upper(),
        format=f"[%(asctime)s TP{plan.rank}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )
    return Follower(channel, plan).run(load)


def join(address: str, rank: int, device: str, timeout_s: float, load: Load = load_rank) -> int:
    """Finds rank 0 through the store at an address, and serves it. Returns the exit code.

    Raises: RuntimeError or OSError when it is not there in time.
    """
    store = open_store(Address.parse(address), is_master=False, timeout_s=timeout_s)
    return follow(connect_to_leader(store, rank, device, timeout_s), load)


def follow_all(layout: Layout, kind: str, command: Sequence[str] = WORKER) -> int:
    """Runs what ranks of a layout belong to a process that does not lead. Returns the exit code.

    kind: cpu or cuda. Raises: RuntimeError or OSError when rank 0 is not there in time.
    """
    layout.check()
    address = layout.init_address
    assert address is not None and not layout.leads
    if layout.is_launched:
        return join(address, layout.rank, layout.device(kind, layout.rank), layout.timeout_s)
    processes = [
        subprocess.Popen(
            [
                *command, "--join", address, "--rank", str(rank),
                "--device", layout.device(kind, rank), "--timeout", str(layout.timeout_s),
            ],
            stdin=subprocess.DEVNULL,
        )
        for rank in layout.local_ranks
    ]  # fmt: skip
    codes = [processes[0].wait()]  # rank 0 ends them all
    for process in processes[1:]:
        try:
            codes.append(process.wait(NODE_GRACE_S))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait())
    return 0 if not any(codes) else 1


def die_with_parent() -> None:
    """Has the system kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: Sequence[str] | None = None, load: Load = load_rank) -> int:
    parser = argparse.ArgumentParser(prog="treadle.graphs.rank_main")
    parser.add_argument("--fd", type=int, help="a stream to rank 0, inherited")
    parser.add_argument("--join", help="host:port of the ranks' store")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    options = parser.parse_args(arguments)
    die_with_parent()
    if options.fd is None:
        try:
            return join(options.join, options.rank, options.device, options.timeout, load)
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0]
            print(f"rank {options.rank}: no engine at {options.join}: {reason}", file=sys.stderr)
            return 1
    # rank 0 ends us in order: a signal to the whole process group is not meant for us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return follow(socket.socket(fileno=options.fd), load)


def leave(code: int) -> None:
    """Ends the process without waiting for what may still hang in a collective."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
