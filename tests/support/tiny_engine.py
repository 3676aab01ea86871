"""Engines on the host device with a small random model, for tests of host and device together."""

from __future__ import annotations

from typing import Any

import torch
from fake_engine import ByteTokenizer

from treadle.engine.config import EngineConfig
from treadle.engine.info import EngineInfo, Parts
from treadle.graphs.arena import HostArena
from treadle.graphs.assemble import ExecutorOptions, build_executor
from treadle.graphs.device import HostDevice
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import DecoderSpec, RopeSpec
from treadle.graphs.runner import Forwarded, Runner
from treadle.graphs.step import Capacity, KvGroup, Step
from treadle.graphs.weights.dummy import fill_randomly

VOCAB = 300
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
    """Keeps the logits of every step, by the number of tokens that each row had."""

    def __init__(self, runner: Runner) -> None:
        self.logits: list[tuple[int, torch.Tensor]] = []
        self._runner = runner
        self._forward = runner.forward
        runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, step: Step) -> Forwarded:
        forwarded = self._forward(step)
        rows = forwarded.sampling_rows
        lengths = step.plan.max_len[rows].tolist()
        self.logits += list(
            zip(lengths, forwarded.outputs.logits[: len(rows)].clone(), strict=True)
        )
        return forwarded


def tiny_parts(
    decoder: Decoder,
    *,
    page_size: int = 4,
    tokens: int = 2048,
    options: ExecutorOptions = ExecutorOptions(),  # noqa: B008
    **flags: Any,
) -> tuple[Parts, Recorder]:
    """An engine's parts, and what records the logits of its steps."""
    group = KvGroup("full", page_size, tokens // page_size, 1)
    capacity = Capacity((group,), 16, SPEC.max_position, VOCAB)
    device, arena = HostDevice(), HostArena()
    shape = KvShape(SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, torch.float32)
    memory = KvMemory(shape, group, capacity, arena)
    for k, v in memory.layers:
        k.fill_(torch.nan)
        v.fill_(torch.nan)
    memory.clear_scratch()
    info = EngineInfo(
        served_model_name="tiny", model_path="tiny", tokenizer_path="tiny", architectures=(),
        model_type="llama", max_model_len=SPEC.max_position, vocab_size=VOCAB, created=1,
        version="0", server_args={"device": "cpu"},
    )  # fmt: skip
    config = EngineConfig.from_flags(flags)
    chunk = config.schedule.chunked_prefill_size or 512
    executor = build_executor(decoder, memory, capacity, device, arena, options)
    parts = Parts(executor, ByteTokenizer(), info, 16, chunk, config)
    return parts, Recorder(executor.runner)
