"""What a rank is told before its first command: where it stands, its model, and its memory.

Plain values that travel as JSON; knows no tensor, no socket and no process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from treadle.graphs.buckets import Buckets
from treadle.graphs.rendezvous import Address


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part, decided by rank 0. What differs between ranks are `rank` and `device`."""

    rank: int
    size: int  # ranks in all
    device: str  # cpu, cuda:N
    store: str  # host:port of the store that rank 0 keeps
    model_path: str
    load_format: str
    dtype: str  # as torch calls it, without `torch.`
    max_model_len: int  # tokens
    seed: int = 0  # of random weights
    attention: tuple[tuple[str, str], ...] = ()  # backend by phase
    memory_saver: bool = False
    num_threads: int | None = None  # of the host's kernels; None: torch's default
    timeout_s: float = 600.0  # for the ranks to meet, and for a collective
    heartbeat_s: float = 1.0
    log_level: str = "info"
    is_debug: bool = False  # every step's plan and tokens are compared with rank 0's

    def for_rank(self, rank: int, device: str) -> RankPlan:
        return replace(self, rank=rank, device=device)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes | bytearray) -> RankPlan:
        values = json.loads(data)
        pairs = tuple((phase, name) for phase, name in values.pop("attention"))
        return cls(**values, attention=pairs)


@dataclass(frozen=True, slots=True)
class Allocation:
    """What every rank makes room for, once rank 0 knows what all of them have."""

    page_size: int  # tokens
    pages: int
    slots: int
    max_model_len: int  # tokens
    vocab_size: int
    depth: int  # steps in flight
    decode_rows: tuple[int, ...] = ()
    prefill_tokens: tuple[int, ...] = ()
    padding: bool = True
    num_token_ids: int | None = None
    reserve_bytes: int | None = None  # what graphs may take

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.decode_rows, self.prefill_tokens, self.padding)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes | bytearray) -> Allocation:
        values = json.loads(data)
        rows, tokens = tuple(values.pop("decode_rows")), tuple(values.pop("prefill_tokens"))
        return cls(**values, decode_rows=rows, prefill_tokens=tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which ranks there are and where each of them runs."""

    size: int
    num_nodes: int = 1
    node_rank: int = 0
    init_address: str | None = None  # host:port; None: any free port of this machine
    port: int | None = None  # of the store, on one machine
    timeout_s: float = 600.0
    base_gpu_id: int = 0
    is_launched: bool = False  # every rank has been started already, by torchrun
    rank: int = 0  # this process's, where is_launched
    local_rank: int = 0  # likewise, on its node

    @classmethod
    def from_torchrun(
        cls, environment: Mapping[str, str], timeout_s: float = 600.0
    ) -> Layout | None:
        """None for a process that torchrun has not started."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        size = int(environment["WORLD_SIZE"])
        return cls(
            size=size,
            num_nodes=size // int(environment.get("LOCAL_WORLD_SIZE", size)),
            init_address=f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}",
            timeout_s=timeout_s,
            is_launched=True,
            rank=int(environment["RANK"]),
            local_rank=int(environment["LOCAL_RANK"]),
        )

    @property
    def per_node(self) -> int:
        return self.size // self.num_nodes

    @property
    def local_ranks(self) -> range:
        """Of this node."""
        first = self.node_rank * self.per_node
        return range(first, first + self.per_node)

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0's."""
        return self.rank == 0 if self.is_launched else self.node_rank == 0

    @property
    def spawned(self) -> tuple[int, ...]:
        """Ranks that rank 0 starts; the others come by themselves."""
        return () if self.is_launched else tuple(range(1, self.per_node))

    def device(self, kind: str, rank: int) -> str:
        """kind: cpu or cuda."""
        place = self.local_rank if self.is_launched else rank % self.per_node
        return kind if kind == "cpu" else f"{kind}:{self.base_gpu_id + place}"

    def check(self) -> None:
        """Raises: ValueError."""
        if self.size < 1 or self.num_nodes < 1 or self.size % self.num_nodes:
            raise ValueError(f"{self.size} ranks cannot be spread evenly over {self.num_nodes}")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"node rank {self.node_rank} is not within 0 to {self.num_nodes - 1}")
        if self.init_address is not None:
            Address.parse(self.init_address)
        if self.num_nodes > 1 and not self.is_launched and self.init_address is None:
            raise ValueError("ranks on several nodes need the address at which they meet")
