"""The executor on a GPU: graphs against eager steps, both against the same weights on the host.

Coroutines run in `asyncio.run`, so that an installation without pytest-asyncio runs them too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.graphs.backends import Body, CaptureError, CudaGraphs
from treadle.graphs.buckets import Buckets
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.step import MEMORY_TAGS, Step
from treadle.kernels.paged_attention import AttentionMeta
from treadle.perf.gpu import memory, replay
from treadle.perf.gpu.player import Work, play
from treadle.perf.gpu.rig import Rig, Room
from treadle.perf.gpu.sections import Setting
from treadle.perf.gpu.shapes import SMALL

pytestmark = pytest.mark.gpu

VOCAB = SMALL.spec.vocab_size
BUCKETS = Buckets((1, 2, 4), (8, 32))
IDLE_S = 0.05  # longer than the executor waits before it captures


def run(rig: Rig, body: Coroutine[Any, Any, None]) -> None:
    async def closed() -> None:
        try:
            await body
        finally:
            await rig.close()

    asyncio.run(closed())


def make_rig(page_size: int = 4, **given: Any) -> Rig:
    room = Room(4, 2048, BUCKETS, page_size)
    return Rig(SMALL.spec, room, "cuda", in_background=True, **given)


class Host:
    """The same weights on the CPU: logits of a sequence's last token, from scratch."""

    def __init__(self, rig: Rig) -> None:
        self._spec = rig.spec
        self._decoder = Decoder(rig.spec, {name: x.cpu() for name, x in rig.parameters.items()})

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        spec, length = self._spec, len(tokens)
        shape = (length, spec.num_kv_heads, spec.head_dim)
        caches = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(spec.num_layers)]
        meta = AttentionMeta(
            torch.tensor([0, length]).int(), torch.tensor([length]).int(), torch.tensor([0]),
            torch.zeros(1, 1).int(), length, length, length,
        )  # fmt: skip
        positions = torch.arange(length)
        hidden = self._decoder.forward(torch.tensor(tokens), positions, caches, positions, meta)
        return self._decoder.logits(hidden[-1:])[0]

    def check(self, found: Tensor, tokens: Sequence[int]) -> None:
        """TF32 is off by default: fp32 on both sides, summed in another order."""
        want = self.logits(tokens)
        spread = (want.max() - want.min()).item()
        assert spread > 1
        assert (found.cpu() - want).abs().max().item() <= 1e-4 * spread


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 5])
def test_replay_equals_eager_bit_for_bit_in_every_graph(dtype: str, page_size: int) -> None:
    values = replay.replay("cuda", dtype, page_size)
    assert isinstance(values["replayed"], int) and values["replayed"] > 60


@pytest.mark.parametrize("captured", [False, True])
def test_overlapped_chunks_and_decodes_equal_the_host(captured: bool) -> None:
    rig = make_rig(random.choice((1, 3, 16)))
    rig.probe.keeps_logits = True
    rig.probe.is_eager = not captured
    host = Host(rig)
    prompts = {slot: rig.player.tokens(random.randint(20, 60)) for slot in range(3)}

    async def body() -> None:
        if captured:
            rig.executor.prepare(all_graphs=True)
        steps, known = [], {slot: list[int]() for slot in prompts}
        ends: list[dict[int, int]] = []  # by step: how many tokens the sampling rows then have
        while any(len(known[slot]) < len(prompts[slot]) for slot in prompts):
            work = []
            for slot, prompt in prompts.items():
                begin = len(known[slot])
                chunk = prompt[begin : begin + random.randint(1, 9)]
                if chunk:
                    known[slot] += chunk
                    work.append(Work(slot, chunk, samples=len(known[slot]) == len(prompt)))
            steps.append(rig.player.step(work))
            ends.append({w.slot: len(known[w.slot]) for w in work if w.samples})
        lengths = {slot: len(prompt) for slot, prompt in prompts.items()}
        for _ in range(12):
            steps.append(rig.player.step([Work(slot) for slot in prompts]))
            lengths = {slot: length + 1 for slot, length in lengths.items()}
            ends.append(dict(lengths))
        results = await play(rig.executor, steps)
        texts = {slot: list(prompt) for slot, prompt in prompts.items()}
        for step, result, end in zip(steps, results, ends, strict=True):
            slots = [
                int(s) for s, ok in zip(step.plan.req_slot, step.plan.samples, strict=True) if ok
            ]
            for row, slot in enumerate(slots):
                assert len(texts[slot]) == end[slot]
                host.check(rig.probe.logits[step.seq][row], texts[slot])
            for slot, token in zip(slots, result.token_ids[step.plan.samples, 0], strict=True):
                texts[slot].append(int(token))
            assert result.replayed == captured

    run(rig, body())


def test_slot_and_pages_serve_the_next_request_while_a_step_is_in_flight() -> None:
    rig = make_rig()
    rig.probe.keeps_logits = True
    host = Host(rig)
    old, new = rig.player.tokens(30), rig.player.tokens(30)

    async def body() -> None:
        steps = [rig.player.step([Work(1, old)])]
        rig.player.restart(1)
        steps.append(rig.player.step([Work(1, new)]))
        await play(rig.executor, steps)
        for step, tokens in zip(steps, (old, new), strict=True):
            host.check(rig.probe.logits[step.seq][0], tokens)

    run(rig, body())


@pytest.mark.parametrize("captured", [False, True])
def test_late_mask_is_obeyed_and_nothing_touches_the_logits_before(captured: bool) -> None:
    """Without `captured` graphs are captured while the mask is awaited."""
    rig = make_rig()
    host = Host(rig)
    prompts = [rig.player.tokens(7), rig.player.tokens(12)]

    async def body() -> None:
        if captured:
            rig.executor.prepare(all_graphs=True)
        rows = [Work(slot, prompt) for slot, prompt in enumerate(prompts)]
        handle = rig.executor.launch(rig.player.step(rows, constrained=True))
        await asyncio.sleep(4 * IDLE_S)
        assert not handle.done()
        best = [int(host.logits(prompt).argmax()) for prompt in prompts]
        mask = np.ones((2, VOCAB), dtype=np.bool_)
        mask[0, best[0]] = False
        handle.sample(mask)
        tokens = (await handle).token_ids[:, 0].tolist()
        second = host.logits(prompts[0]).topk(2).indices[1]
        assert tokens == [int(second), best[1]]

    run(rig, body())


def test_step_that_raises_reports_it_and_the_next_one_runs() -> None:
    rig = make_rig()
    rig.probe.keeps_logits = True
    host = Host(rig)

    async def body() -> None:
        bad = rig.executor.launch(rig.player.step([Work(0, [VOCAB + 3])]))
        rig.player.restart(0)
        good = rig.player.step([Work(0, [4, 2])])
        handle = rig.executor.launch(good)
        with pytest.raises(IndexError):
            await bad
        await handle
        host.check(rig.probe.logits[good.seq][0], [4, 2])
        assert rig.executor.is_alive()

    run(rig, body())


class Refusing(CudaGraphs):
    """Breaks the capture of every second body from inside, with a call that capture forbids."""

    def capture(self, body: Body) -> Any:
        self.count = getattr(self, "count", 0) + 1
        if self.count % 2:
            return super().capture(body)

        def broken() -> None:
            body()
            torch.cuda.current_stream().synchronize()

        return super().capture(broken)


def test_failed_captures_leave_steps_and_other_graphs_intact() -> None:
    rig = make_rig(backend=Refusing(torch.device("cuda", 0)))
    rig.probe.keeps_logits = True
    host = Host(rig)
    prompts = [rig.player.tokens(6) for _ in range(4)]

    async def body() -> None:
        rig.executor.prepare(all_graphs=True)
        assert rig.probe.not_captured and rig.probe.capture_s
        steps: list[Step] = [rig.player.step([Work(s, p) for s, p in enumerate(prompts)])]
        for rows in (1, 2, 4):
            steps.append(rig.player.step([Work(slot) for slot in range(rows)]))
        results = await play(rig.executor, steps)
        texts = [[*prompt] for prompt in prompts]
        for step, result in zip(steps, results, strict=True):
            for row, token in enumerate(result.token_ids[:, 0].tolist()):
                host.check(rig.probe.logits[step.seq][row], texts[row])
                texts[row].append(token)
        await rig.executor.close()
        rig.executor.runner.graphs.clear()

    run(rig, body())


def test_capture_error_names_what_is_not_allowed() -> None:
    graphs = CudaGraphs(torch.device("cuda", 0))
    x = torch.zeros(8, device="cuda")
    with pytest.raises(CaptureError):
        graphs.capture(lambda: print(x.sum().item()))

    def count() -> None:
        x.add_(1)

    graph = graphs.capture(count)
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3.0] * 8


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",), MEMORY_TAGS])
def test_released_memory_is_free_and_answers_come_back(tags: Any) -> None:
    pytest.importorskip("cuda.bindings")
    values = memory.cycle(Setting("cuda", is_tiny=True), tags)
    assert values["tokens"] == 63


def test_bf16_weights_of_two_rigs_are_equal() -> None:
    spec = replace(SMALL.spec, dtype="bfloat16")
    rigs = [Rig(spec, Room(4, 64, BUCKETS), "cuda", seed=5) for _ in range(2)]
    for name, ours in rigs[0].parameters.items():
        assert torch.equal(ours, rigs[1].parameters[name]), name
    for rig in rigs:
        asyncio.run(rig.close())
