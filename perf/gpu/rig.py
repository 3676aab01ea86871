"""A decoder with random weights, its KV memory and an executor, built for measuring.

Knows the device side; never a server or a checkpoint. What is measured is wrapped from outside.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from treadle.graphs.arena import Arena, open_arena
from treadle.graphs.assemble import ExecutorOptions, build_executor
from treadle.graphs.backends import GraphBackend
from treadle.graphs.buckets import Buckets, GraphKey
from treadle.graphs.device import Device, open_device
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.layers.attention import ByPhase
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.runner import Forwarded
from treadle.graphs.step import Bools, Capacity, GraphChoice, KvGroup, Step, StepPlan
from treadle.graphs.weights.dummy import fill_randomly
from treadle.kernels import attention_backends
from treadle.perf.gpu.player import Player
from treadle.perf.gpu.sections import Unmeasured, Values


@dataclass(frozen=True, slots=True)
class Room:
    """What a rig makes room for."""

    slots: int
    tokens: int  # of KV
    buckets: Buckets
    page_size: int = 16
    depth: int = 2


class Rig:
    """Weights and KV depend on the seed alone, so two rigs of one spec compute the same."""

    def __init__(
        self,
        spec: DecoderSpec,
        room: Room,
        device: str,
        *,
        memory_saver: bool = False,
        backend: GraphBackend | None = None,
        in_background: bool = False,
        seed: int = 0,
    ) -> None:
        """backend: None for the device's graphs. in_background: they are captured when idle."""
        self.spec, self.room, self.seed = spec, room, seed
        self.dtype = getattr(torch, spec.dtype)
        self.device: Device = open_device(device)
        self.arena: Arena = open_arena(self.device.torch_device, memory_saver)
        self.parameters: Mapping[str, Tensor] = {
            name: self.arena.empty("weights", shape, self.dtype)
            for name, shape in parameter_shapes(spec).items()
        }
        self.fill_weights()
        group = KvGroup("full", room.page_size, -(-room.tokens // room.page_size), 1)
        self.capacity = Capacity((group,), room.slots, spec.max_position, spec.vocab_size)
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, self.dtype)
        self.kv_bytes_per_token = shape.bytes_per_token
        self.memory = KvMemory(shape, group, self.capacity, self.arena)
        random = torch.Generator(self.device.torch_device).manual_seed(seed)
        for layer in self.memory.layers:
            for cache in layer:
                cache.normal_(generator=random)
        self.memory.clear_scratch()
        self.device.synchronize()  # all of this was queued on another stream than the steps'
        options = ExecutorOptions(
            room.depth, room.buckets, in_background=in_background, backend=backend
        )
        self.executor: DeviceExecutor = build_executor(
            _decoder(spec, self.parameters, device), self.memory, self.capacity, self.device,
            self.arena, options, self.fill_weights,
        )  # fmt: skip
        self.probe = Probe(self.executor, self.device)  # at once: idle, the executor captures
        self.player = Player(self.capacity, seed)

    def fill_weights(self) -> None:
        fill_randomly(self.parameters, self.seed, None)

    def try_compile_ahead(self) -> Values:
        """As `compile_ahead`; what goes wrong there need not stop the steps."""
        try:
            return self.compile_ahead()
        except Unmeasured:
            return {}
        except Exception as error:
            traceback.print_exc()
            return {"compile_ahead": f"{type(error).__name__}: {error}"[:200]}

    def compile_ahead(self) -> Values:
        """Triton's kernels for the steps of this rig. Raises: Unmeasured on a host."""
        if self.device.is_host:
            raise Unmeasured("nothing to compile on the CPU")
        from treadle.kernels.gpu import compile_ahead

        spec = self.spec
        sizes = compile_ahead.ModelShape(
            hidden_size=spec.hidden_size, num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
            rotary_dim=spec.rope.rotary_dim, interleaved=spec.rope.interleaved,
            qk_norm=spec.qk_norm, intermediate_size=spec.intermediate_size,
            is_gelu=spec.activation == "gelu_tanh", vocab_size=spec.vocab_size,
            num_token_ids=spec.vocab_size, dtype=self.dtype, kv_dtype=self.dtype,
            page_size=self.memory.group.page_size, windows=frozenset(spec.windows),
            max_rows=self.capacity.slots, max_tokens=max(self.room.buckets.prefill_tokens),
        )  # fmt: skip
        done = compile_ahead.compile_ahead(sizes, self.device.torch_device, workers=8)
        return {"kernels": done.num_kernels, "compile_s": done.seconds}

    async def close(self) -> None:
        await self.executor.close()


def _decoder(spec: DecoderSpec, parameters: Mapping[str, Tensor], device: str) -> Decoder:
    decoder = Decoder(spec, parameters)
    window = any(each is not None for each in spec.windows)
    needs = attention_backends.AttentionNeeds(device, decoder.dtype, spec.head_dim, window)
    chosen = [attention_backends.choose(needs, phase).name for phase in ("prefill", "decode")]
    decoder.attention_backend = ByPhase(*map(attention_backends.load, chosen))
    return decoder


@dataclass(slots=True)
class Stamp:
    """One step as the launch thread saw it."""

    launch_s: float = 0.0  # in forward and sample
    begin: Any = None
    end: Any = None


@dataclass(slots=True)
class Probe:
    """Notes what the launch thread does; may send steps past their graphs."""

    executor: DeviceExecutor
    device: Device
    is_eager: bool = False  # steps run eagerly in the shapes that their graphs have
    keeps_logits: bool = False
    stamps: dict[int, Stamp] = field(default_factory=dict)  # by seq
    logits: dict[int, Tensor] = field(default_factory=dict)  # by seq, rows that sample
    replayed: Counter[GraphKey] = field(default_factory=Counter)  # parts of a key count each
    capture_s: dict[GraphKey, float] = field(default_factory=dict)
    not_captured: dict[GraphKey, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        runner = self.executor.runner
        self._wrap(runner, "forward", self._forward)
        self._wrap(runner, "sample", self._sample)
        self._wrap(runner.graphs, "choose", self._choose)
        self._wrap(runner.graphs, "replay", self._replay)
        self._wrap(runner.graphs, "capture", self._capture)

    def idle_ms(self) -> float:
        """Between the end of a step and the begin of the next one, all of those kept."""
        kept = [self.stamps[seq] for seq in sorted(self.stamps)]
        gaps = zip(kept, kept[1:], strict=False)
        return sum(max(0.0, _between_ms(first.end, then.begin)) for first, then in gaps)

    @staticmethod
    def _wrap(owner: object, name: str, wrapper: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            return wrapper(inner, *arguments)

        setattr(owner, name, call)

    def _forward(self, inner: Callable[[Step], Forwarded], step: Step) -> Forwarded:
        stamp = self.stamps[step.seq] = Stamp(begin=self._mark())
        started = time.perf_counter()
        forwarded = inner(step)
        stamp.launch_s += time.perf_counter() - started
        if self.keeps_logits:
            count = len(forwarded.sampling_rows)
            self.logits[step.seq] = forwarded.outputs.logits[:count].clone()
        return forwarded

    def _sample(
        self,
        inner: Callable[[Step, Forwarded, Bools | None], Any],
        step: Step,
        forwarded: Forwarded,
        mask: Bools | None,
    ) -> Any:
        started = time.perf_counter()
        event = inner(step, forwarded, mask)
        stamp = self.stamps[step.seq]
        stamp.launch_s += time.perf_counter() - started
        stamp.end = self._mark()
        return event

    def _choose(self, inner: Callable[[StepPlan], GraphChoice], plan: StepPlan) -> GraphChoice:
        choice = inner(plan)
        return replace(choice, replays=False) if self.is_eager else choice

    def _replay(self, inner: Callable[..., None], key: GraphKey, part: int = 0) -> None:
        inner(key, part)
        self.replayed[key] += 1

    def _capture(self, inner: Callable[[GraphKey], None], key: GraphKey) -> None:
        self.device.synchronize()
        started = time.perf_counter()
        try:
            inner(key)
            self.device.synchronize()
        except Exception as error:
            self.not_captured[key] = str(error)
            raise
        self.capture_s[key] = time.perf_counter() - started

    def _mark(self) -> Any:
        """A point in the device's work: a CUDA event, or the time on a host."""
        if self.device.is_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between_ms(first: Any, then: Any) -> float:
    if isinstance(first, float):
        return 1e3 * float(then - first)
    elapsed: float = first.elapsed_time(then)
    return elapsed
