"""Plays the scheduler for an executor: hand-made plans over a small random model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from treadle.graphs.arena import HostArena
from treadle.graphs.assemble import ExecutorOptions, build_executor
from treadle.graphs.device import HostDevice
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.parameters import parameter_shapes
from treadle.graphs.models.spec import DecoderSpec, RopeSpec
from treadle.graphs.step import (
    Capacity,
    KvGroup,
    Mode,
    PageTableUpdate,
    SamplingBatch,
    SlotInit,
    Step,
    StepPlan,
    StepResult,
)
from treadle.graphs.weights.dummy import fill_randomly
from treadle.kernels.paged_attention import AttentionMeta

VOCAB = 97
CONTEXT = 64
SPEC = DecoderSpec(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=48, num_layers=2, num_heads=6,
    num_kv_heads=2, head_dim=8, intermediate_size=64, norm_eps=1e-5, activation="silu",
    rope=RopeSpec(10000.0, 8), windows=(None, None), max_position=CONTEXT, dtype="float32",
)  # fmt: skip


def make_decoder(spec: DecoderSpec = SPEC, dtype: torch.dtype = torch.float32) -> Decoder:
    parameters = {
        name: torch.empty(shape, dtype=dtype) for name, shape in parameter_shapes(spec).items()
    }
    fill_randomly(parameters, 0, None)
    made = Decoder(spec, parameters)
    for layer in made.layers:  # stronger than a usual start, so that attention matters
        layer.attention.qkv.weight.mul_(8)
    return made


class Host:
    """A scheduler for a few rows, each with its own slot and pages."""

    def __init__(
        self,
        decoder: Decoder,
        page_size: int = 4,
        late_s: float = 0.0,
        slots: int = 4,
        device: HostDevice | None = None,
        options: ExecutorOptions = ExecutorOptions(),  # noqa: B008
    ) -> None:
        spec = decoder.spec
        group = KvGroup("full", page_size, slots * (-(-CONTEXT // page_size)), 1)
        capacity = Capacity((group,), slots, CONTEXT, spec.vocab_size)
        device, arena = device or HostDevice(max_delay_s=late_s), HostArena()
        shape = KvShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, decoder.dtype)
        self.memory = KvMemory(shape, group, capacity, arena)
        for k, v in self.memory.layers:
            k.fill_(torch.nan), v.fill_(torch.nan)
        self.memory.clear_scratch()
        parameters = dict[str, Any]()
        self.executor = build_executor(
            decoder, self.memory, capacity, device, arena, options, lambda: parameters.clear()
        )
        self.page_size = page_size
        self.seq = 0
        self.length = [0] * slots
        pages = random.Random(0).sample(range(group.pages), group.pages)
        width = group.pages // slots
        self.pages = [pages[slot * width : (slot + 1) * width] for slot in range(slots)]

    def step(
        self,
        rows: Sequence[tuple[int, Sequence[int] | None]],
        *,
        samples: Sequence[bool] | None = None,
        temperature: float = 0.0,
        constrained: bool = False,
        fresh: bool = False,
    ) -> Step:
        """rows: (slot, host tokens, or None to decode the slot's own last token).

        fresh: the slots begin anew.
        """
        if fresh:
            for slot, _ in rows:
                self.length[slot] = 0
        self.seq += 1
        updates = []
        for slot, tokens in rows:
            start = self.length[slot]
            self.length[slot] += 1 if tokens is None else len(tokens)
            first, last = -(-start // self.page_size), -(-self.length[slot] // self.page_size)
            updates += [(slot, i, self.pages[slot][i]) for i in range(first, last)]
        table = np.array(updates, dtype=np.int32).reshape(-1, 3)
        slots = np.array([slot for slot, _ in rows], dtype=np.int32)
        count = len(rows)
        plan = StepPlan(
            mode=_mode([tokens for _, tokens in rows]),
            req_slot=slots,
            epoch=np.zeros(count, dtype=np.int32),
            q_len=np.array([1 if t is None else len(t) for _, t in rows], dtype=np.int32),
            from_host=np.array([t is not None for _, t in rows]),
            max_len=np.array([self.length[slot] for slot, _ in rows], dtype=np.int32),
            samples=np.array(samples if samples is not None else [True] * count),
            token_ids=np.array([i for _, t in rows for i in t or ()], dtype=np.int32),
            page_updates={"full": PageTableUpdate(table[:, 0], table[:, 1], table[:, 2])}
            if updates
            else {},
            slot_init=SlotInit(slots, slots * 0, np.arange(count, dtype=np.uint64))
            if fresh
            else None,
            sampling=SamplingBatch(
                np.full(count, temperature, dtype=np.float32),
                all_greedy=temperature == 0,
                constrained=np.full(count, True) if constrained else None,
            ),
        )
        return Step(self.seq, (plan,))


def _mode(tokens: Sequence[Sequence[int] | None]) -> Mode:
    if all(each is None for each in tokens):
        return "decode"
    return "mixed" if None in tokens else "prefill"


@torch.inference_mode()
def continued(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens after a prompt, each from a fresh forward over everything before it."""
    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        shape = (length, decoder.spec.num_kv_heads, decoder.spec.head_dim)
        cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in decoder.layers]
        meta = AttentionMeta(
            torch.tensor([0, length]).int(), torch.tensor([length]).int(),
            torch.tensor([0]), torch.zeros(1, 1).int(), length, length, length,
        )  # fmt: skip
        positions = torch.arange(length)
        hidden = decoder.forward(torch.tensor(tokens), positions, cache, positions, meta)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def column(result: StepResult) -> list[int]:
    return [int(token) for token in result.token_ids[:, 0]]
