"""Engines on the host device with a small random model, for tests of host and device together."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fake_engine import ByteTokenizer
from rank_host import WORKER, a_plan

from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.graphs.arena import HostArena
from treadle.graphs.assemble import ExecutorOptions, build_executor
from treadle.graphs.buckets import Buckets
from treadle.graphs.device import HostDevice
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.followers import Team
from treadle.graphs.handles import DeviceHandle
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import DecoderSpec, RopeSpec
from treadle.graphs.rank_model import ModelRank
from treadle.graphs.rank_plan import Allocation, Layout
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.runner import Forwarded, Runner
from treadle.graphs.step import Capacity, GraphReport, KvGroup, MemoryTag, Step
from treadle.graphs.weights.dummy import fill_randomly
from treadle.graphs.weights.load import read_spec

VOCAB = 300
SLOTS = 16
TOKENS = 2048  # of a KV pool
BUCKETS = Buckets((1, 2, 4, 8, 16), (8, 32))
NO_BUCKETS = Buckets((), ())
SPEC = DecoderSpec(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=48, num_layers=2, num_heads=6,
    num_kv_heads=2, head_dim=8, intermediate_size=64, norm_eps=1e-5, activation="silu",
    rope=RopeSpec(10000.0, 8), windows=(None, None), max_position=512, dtype="float32",
)  # fmt: skip


def tiny_decoder(seed: int = 0) -> Decoder:
    parameters = {name: torch.empty(shape) for name, shape in parameter_shapes(SPEC).items()}
    fill_randomly(parameters, seed, None)
    decoder = Decoder(SPEC, parameters)
    for layer in decoder.layers:  # stronger than a usual start, so that attention matters
        layer.attention.qkv.weight.mul_(8)
    return decoder


class Recorder:
    """Keeps the logits of every step, by the number of tokens that each row had.

    Of several ranks it sees the first one's part of the vocabulary.
    """

    def __init__(self, runner: Runner) -> None:
        self.logits: list[tuple[int, torch.Tensor]] = []
        self._num_ids = runner._programs.decoder.num_ids
        self._forward = runner.forward
        runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, step: Step) -> Forwarded:
        forwarded = self._forward(step)
        rows = forwarded.sampling_rows
        lengths = step.plan.max_len[rows].tolist()
        logits = forwarded.outputs.logits[: len(rows), : self._num_ids].clone()
        self.logits += list(zip(lengths, logits, strict=True))
        return forwarded


def tiny_parts(decoder: Decoder, *, tokens: int = TOKENS, **flags: Any) -> tuple[Parts, Recorder]:
    """An engine's parts, and what records the logits of its steps."""
    group = KvGroup("full", 4, tokens // 4, 1)
    capacity = Capacity((group,), SLOTS, SPEC.max_position, VOCAB)
    device, arena = HostDevice(), HostArena()
    shape = KvShape(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, torch.float32)
    memory = KvMemory(shape, group, capacity, arena)
    executor = build_executor(decoder, memory, capacity, device, arena, ExecutorOptions())
    _poison(executor)
    return _parts(executor, flags), Recorder(executor.runner)


class Machine:
    """A checkpoint on one rank here, or on several in processes; one engine after the other."""

    def __init__(
        self, folder: Path, ranks: int = 1, *, page_size: int = 4, has_graphs: bool = False
    ) -> None:
        """has_graphs: all of them are captured by the time this returns."""
        self.page_size = page_size
        spec = read_spec(folder)
        buckets = BUCKETS if has_graphs else NO_BUCKETS
        plan = a_plan(
            folder, ranks, load_format="auto", max_model_len=spec.max_position, is_debug=True
        )
        allocation = Allocation(
            page_size, TOKENS // page_size, SLOTS, spec.max_position, spec.vocab_size, depth=2,
            decode_rows=buckets.decode_rows, prefill_tokens=buckets.prefill_tokens,
        )  # fmt: skip
        self.executor: DeviceExecutor | RankedExecutor
        if ranks == 1:
            self.executor = self.local = ModelRank(plan, None).allocate(allocation)
            self.local.start()
        else:
            team = Team(Layout(ranks), plan, "cpu", WORKER)
            try:
                self.local = ModelRank(team.plan, team.group).allocate(allocation)
                team.wait_loaded()
                team.allocate(allocation)
                self.executor = RankedExecutor(self.local, team, watchdog_timeout_s=60.0)
            except BaseException:
                team.close(at_once=True)
                raise
        self.executor.prepare(all_graphs=True)
        self.recorder = Recorder(self.local.runner)
        self.num_steps = 0  # launched so far
        _poison(self.local)

    def parts(self, *, tokens: int = TOKENS, **flags: Any) -> Parts:
        """Of the next engine, once the one before is closed. tokens: of the pool it may use."""
        return _parts(_Lent(self, tokens), flags)

    async def close(self) -> None:
        assert self.executor.is_alive()
        await self.executor.close()


class _Lent:
    """Implements `Executor`: a machine's as one engine has it, which it closes for itself only."""

    def __init__(self, machine: Machine, tokens: int) -> None:
        self._machine = machine
        self._offset = machine.num_steps
        capacity = machine.executor.capacity
        (group,) = capacity.groups
        group = replace(group, pages=tokens // group.page_size)
        self.capacity = replace(capacity, groups=(group,))
        self.depth = machine.executor.depth

    def launch(self, step: Step) -> DeviceHandle:
        handle = self._machine.executor.launch(replace(step, seq=self._offset + step.seq))
        self._machine.num_steps += 1
        return handle

    async def release(self, tags: Collection[MemoryTag]) -> None:
        await self._machine.executor.release(tags)

    async def resume(self, tags: Collection[MemoryTag]) -> None:
        await self._machine.executor.resume(tags)

    def graphs(self) -> GraphReport:
        return self._machine.executor.graphs()

    def is_alive(self) -> bool:
        return self._machine.executor.is_alive()

    async def close(self) -> None:
        """Waits for what is queued, and leaves nothing that the next engine could find."""
        local = self._machine.local
        await asyncio.wrap_future(local.commands.call(lambda: _poison(local)))


@torch.inference_mode()
def _poison(executor: DeviceExecutor) -> None:
    """No token can come from what was never written: one rank's NaN is everybody's."""
    memory = executor.runner._memory
    for k, v in memory.layers:
        k.fill_(torch.nan)
        v.fill_(torch.nan)
    memory.clear_scratch()


def _parts(executor: DeviceExecutor | _Lent, flags: dict[str, Any]) -> Parts:
    capacity = executor.capacity
    info = EngineInfo(
        served_model_name="tiny", model_path="tiny", tokenizer_path="tiny", architectures=(),
        model_type="llama", max_model_len=capacity.max_model_len, vocab_size=capacity.vocab_size,
        created=1, version="0", server_args={"device": "cpu"},
    )  # fmt: skip
    config = EngineConfig.from_flags(flags)
    chunk = config.schedule.chunked_prefill_size or 512
    return Parts(executor, ByteTokenizer(), info, SLOTS, chunk, config)
