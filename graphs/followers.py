"""The other ranks as rank 0 sees them: how they come, load and make room, and what they are sent.

Knows the order of their start and the group that sums over them; never what a command does.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from treadle.graphs.command_codec import Close, encode
from treadle.graphs.peer import WORKER, Observer, RankError
from treadle.graphs.rank_plan import Allocation, Layout, RankPlan
from treadle.graphs.rendezvous import (
    Address,
    Kind,
    Listener,
    connect_group,
    frame,
    open_store,
    port_of,
)
from treadle.graphs.switchboard import Switchboard


class Team:
    """All ranks but this one."""

    def __init__(
        self, layout: Layout, plan: RankPlan, kind: str, command: Sequence[str] = WORKER
    ) -> None:
        """Starts what this node has to start, and returns once all ranks are connected.

        plan: of rank 0; its store is filled in. kind: cpu or cuda. command: a worker's program.
        Raises: RankError, ValueError.
        """
        layout.check()
        self.group: dist.ProcessGroup
        self._layout = layout
        self._store, self.plan = self._open_store(plan)
        listener = None
        if len(layout.spawned) < layout.size - 1:
            listener = Listener(Address.parse(self.plan.store).host, self._store)
        self._board = Switchboard(layout, self.plan, kind, command, listener)
        try:
            self._wait("joined", plan.timeout_s)
            self._board.send(frame(Kind.CONNECT, b""))
            self.group = self._connect()
        except BaseException:
            self.close(at_once=True)
            raise

    def wait_loaded(self) -> int:
        """Waits for all ranks' weights. Returns the least memory that one has free, in bytes.

        Raises: RankError.
        """
        self._wait("loaded")
        return min(peer.said["loaded"][0] for peer in self._board.peers.values())

    def allocate(self, allocation: Allocation) -> None:
        """Has all ranks make room. Raises: RankError."""
        self._board.send(frame(Kind.ALLOCATE, allocation.to_json()))
        self._wait("ready")

    def observe(self, observer: Observer) -> None:
        self._board.observe(observer)

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Of ranks that were started here, in the order of ranks."""
        return self._board.processes

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._board.peers))

    def send(self, command: bytes) -> None:
        """An encoded command to all ranks; does not block."""
        self._board.send(frame(Kind.COMMAND, command))

    def progress(self, rank: int) -> tuple[int, int, float]:
        """The last step that a rank has started and finished, and the seconds since it spoke."""
        peer = self._board.peers[rank]
        started, finished = peer.said.get("alive", (0, 0))
        return started, finished, time.monotonic() - peer.heard

    def fail(self, rank: int | None, reason: str) -> None:
        """A sign that a rank is lost; the signs of the next moment may explain it.

        rank: None where the reason names it.
        """
        self._board.fail(rank, reason)

    def close(self, at_once: bool = False) -> None:
        """Ends all processes, those that do not end by themselves by force. Idempotent."""
        self._board.close(None if at_once else frame(Kind.COMMAND, encode(Close())))

    def _open_store(self, plan: RankPlan) -> tuple[Store, RankPlan]:
        given = self._layout.init_address
        address = Address("127.0.0.1", self._layout.port or 0)
        if given is not None:
            address = Address.parse(given)
        try:
            store = open_store(address, is_master=True, timeout_s=plan.timeout_s)
        except (RuntimeError, OSError) as error:
            raise RankError(f"no store for the ranks at {address}: {error}") from error
        where = Address(address.host, port_of(store))
        values = json.loads(plan.to_json()) | {"store": str(where)}
        return store, RankPlan.from_json(json.dumps(values).encode())

    def _connect(self) -> dist.ProcessGroup:
        """In a thread: a rank that dies meanwhile would keep the others until the timeout."""
        made: list[dist.ProcessGroup | Exception] = []

        def connect() -> None:
            device = torch.device(self.plan.device)
            try:
                made.append(
                    connect_group(self._store, 0, self.plan.size, device, self.plan.timeout_s)
                )
            except Exception as error:
                made.append(error)
            self._board.look_again()

        threading.Thread(target=connect, name="treadle-group", daemon=True).start()
        self._board.wait_for(lambda: bool(made))
        if isinstance(made[0], Exception):
            raise RankError(f"the ranks cannot reach each other: {made[0]}") from made[0]
        return made[0]

    def _wait(self, what: str, timeout_s: float | None = None) -> None:
        """Until all ranks have reported it."""
        others, peers = self._layout.size - 1, self._board.peers
        came = self._board.wait_for(
            lambda: sum(what in peer.said for peer in peers.values()) == others, timeout_s
        )
        if not came:
            here = {rank for rank, peer in peers.items() if what in peer.said}
            missing = sorted(set(range(1, self._layout.size)) - here)
            raise RankError(f"ranks {missing} did not come within {timeout_s:g} s")
