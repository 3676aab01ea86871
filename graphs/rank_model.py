"""A rank's plan -> its part of the model, and from that its executor.

Knows how a model is loaded and put together; never a stream, a command or another rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from treadle.graphs.arena import open_arena
from treadle.graphs.assemble import ExecutorOptions, build_executor
from treadle.graphs.device import open_device
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.layers.attention import ByPhase
from treadle.graphs.parallel import TensorParallel
from treadle.graphs.rank_plan import Allocation, RankPlan
from treadle.graphs.step import Capacity, KvGroup
from treadle.graphs.weights.load import load_model, read_spec, reload_parameters
from treadle.kernels import attention_backends


class Rank(Protocol):
    """A rank whose weights are loaded."""

    def free_bytes(self) -> int:
        """Memory that is free now."""

    def allocate(self, allocation: Allocation) -> DeviceExecutor:
        """Makes room, and an executor that is not started."""


class ModelRank:
    """A rank with its part of a checkpoint."""

    def __init__(self, plan: RankPlan, group: dist.ProcessGroup | None) -> None:
        """group: None for a rank alone. Raises: CheckpointError, ValueError."""
        path, dtype = Path(plan.model_path), getattr(torch, plan.dtype)
        spec = replace(read_spec(path), max_position=plan.max_model_len)
        parallel = TensorParallel(plan.rank, plan.size, group)
        self._device = open_device(plan.device)
        self._arena = open_arena(self._device.torch_device, plan.memory_saver)
        loaded = load_model(
            path,
            spec,
            load_format=plan.load_format,
            dtype=dtype,
            allocate=partial(self._arena.empty, "weights"),
            seed=plan.seed,
            parallel=parallel,
        )
        self._decoder = loaded.decoder
        if plan.attention:
            self._decoder.attention_backend = ByPhase(
                **{phase: attention_backends.load(name) for phase, name in plan.attention}
            )
        self._reload = partial(
            reload_parameters, loaded.parameters, path, spec,
            load_format=plan.load_format, seed=plan.seed, parallel=parallel,
        )  # fmt: skip

    def free_bytes(self) -> int:
        return self._device.free_bytes()

    def allocate(self, allocation: Allocation) -> DeviceExecutor:
        decoder, device, arena = self._decoder, self._device, self._arena
        spec = decoder.spec  # of this rank's part
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, decoder.dtype)
        page_bytes = allocation.page_size * shape.bytes_per_token
        group = KvGroup("full", allocation.page_size, allocation.pages, page_bytes)
        capacity = Capacity(
            (group,), allocation.slots, allocation.max_model_len, allocation.vocab_size
        )
        memory = KvMemory(shape, group, capacity, arena)
        options = options_of(allocation)
        return build_executor(decoder, memory, capacity, device, arena, options, self._reload)


def options_of(allocation: Allocation) -> ExecutorOptions:
    """What an executor that runs with other ranks is built with."""
    return ExecutorOptions(
        depth=allocation.depth,
        buckets=allocation.buckets,
        reserve_bytes=allocation.reserve_bytes,
        num_token_ids=allocation.num_token_ids,
        starts=False,
    )


def load_rank(plan: RankPlan, group: dist.ProcessGroup) -> Rank:
    return ModelRank(plan, group)
