"""The device side end to end on a small random model, driven by hand-made plans."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from treadle.graphs.device import HostDevice
from treadle.graphs.executor import DeviceExecutor
from treadle.graphs.kv_memory import KvMemory, KvShape
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.runner import Runner
from treadle.graphs.step import (
    Capacity,
    KvGroup,
    PageTableUpdate,
    SamplingBatch,
    SlotInit,
    Step,
    StepPlan,
    StepResult,
)
from treadle.graphs.weights.load import load_decoder, read_spec

VOCAB = 97
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB,
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "float32",
}  # fmt: skip


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made = load_decoder(
        tmp_path,
        read_spec(tmp_path),
        load_format="dummy",
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        for layer in made.layers:  # stronger than a usual start, so that attention matters
            layer.attention.qkv.weight.mul_(8)
    return made


class Host:
    """Plays the scheduler for a few rows, each with its own slot and pages."""

    def __init__(
        self,
        decoder: Decoder,
        page_size: int,
        depth: int = 2,
        late_s: float = 0.0,
        num_token_ids: int | None = None,
    ) -> None:
        group = KvGroup("full", page_size, 4 * (-(-64 // page_size)), 1)
        capacity = Capacity((group,), 4, 64, VOCAB)
        device = HostDevice(max_delay_s=late_s)
        shape = KvShape(2, 2, 8, torch.float32)
        memory = KvMemory(shape, group, capacity, device.torch_device)
        for k, v in memory.layers:
            k.fill_(torch.nan), v.fill_(torch.nan)
        runner = Runner(decoder, memory, capacity, device, depth, num_token_ids)
        self.executor = DeviceExecutor(runner, device, depth)
        self.page_size = page_size
        self.seq = 0
        self.length = [0] * 4
        pages = random.sample(range(group.pages), group.pages)
        width = group.pages // 4
        self.pages = [pages[slot * width : (slot + 1) * width] for slot in range(4)]

    def step(
        self,
        rows: Sequence[tuple[int, Sequence[int] | None]],
        *,
        samples: Sequence[bool] | None = None,
        temperature: float = 0.0,
        constrained: bool = False,
        fresh: bool = False,
    ) -> Step:
        """rows: (slot, host tokens, or None to decode the slot's own last token)."""
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
            mode="mixed",
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


@torch.inference_mode()
def continued(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens after a prompt, each from a fresh forward over everything before it."""
    from treadle.kernels.paged_attention import AttentionMeta

    tokens = list(prompt)
    for _ in range(count):
        length = len(tokens)
        cache = [(torch.zeros(length, 2, 8), torch.zeros(length, 2, 8)) for _ in range(2)]
        meta = AttentionMeta(
            torch.tensor([0, length]).int(), torch.tensor([length]).int(),
            torch.zeros(1, 1).int(), length, length, length,
        )  # fmt: skip
        positions = torch.arange(length)
        hidden = decoder.forward(torch.tensor(tokens), positions, cache, positions, meta)
        tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def column(result: StepResult) -> list[int]:
    return [int(token) for token in result.token_ids[:, 0]]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("late_s", [0.0, 0.01])
async def test_overlapped_chunks_and_decodes_equal_fresh_forwards(
    decoder: Decoder, page_size: int, late_s: float
) -> None:
    host = Host(decoder, page_size, depth=3, late_s=late_s)
    prompts = [[random.randrange(VOCAB) for _ in range(n)] for n in (5, 11)]
    first = host.executor.launch(
        host.step([(0, prompts[0]), (2, prompts[1][:4])], samples=[True, False], fresh=True)
    )
    second = host.executor.launch(host.step([(0, None), (2, prompts[1][4:])]))
    third = host.executor.launch(host.step([(2, None), (0, None)]))
    one, two, three = await first, await second, await third
    assert one.num_accepted.tolist() == [1, 0]
    got = {0: [column(one)[0], column(two)[0]], 2: [column(two)[1]]}
    got[2].append(column(three)[0])
    got[0].append(column(three)[1])
    assert got[0] == continued(decoder, prompts[0], 3)
    assert got[2] == continued(decoder, prompts[1], 2)
    await host.executor.close()


async def test_slot_and_pages_serve_the_next_request_while_a_step_is_in_flight(
    decoder: Decoder,
) -> None:
    host = Host(decoder, 4)
    old = host.executor.launch(host.step([(1, [1, 2, 3, 4, 5])], fresh=True))
    host.length[1] = 0
    new = host.executor.launch(host.step([(1, [9, 8, 7])], fresh=True))
    assert column(await old) == continued(decoder, [1, 2, 3, 4, 5], 1)
    assert column(await new) == continued(decoder, [9, 8, 7], 1)
    await host.executor.close()


async def test_constrained_step_samples_when_its_mask_comes(decoder: Decoder) -> None:
    host = Host(decoder, 4)
    prompt = [3, 1, 4, 1, 5]
    free = host.executor.launch(host.step([(0, prompt)], fresh=True))
    likeliest = column(await free)[0]
    host.length[0] = 0
    held = host.executor.launch(host.step([(0, prompt)], fresh=True, constrained=True))
    with pytest.raises(RuntimeError, match="still waits for its mask"):
        host.executor.launch(Step(host.seq + 1, held.step.plans))
    await asyncio.sleep(0.02)
    assert not held.done()
    mask = np.ones((1, VOCAB), dtype=np.bool_)
    mask[0, likeliest] = False
    held.sample(mask)
    with pytest.raises(RuntimeError, match="waits for no mask"):
        held.sample(mask)
    second_best = column(await held)[0]
    assert second_best != likeliest
    follow = host.executor.launch(host.step([(0, None)]))
    assert column(await follow) == continued(decoder, [*prompt, second_best], 1)
    await host.executor.close()


async def test_mask_of_none_restricts_nothing(decoder: Decoder) -> None:
    host = Host(decoder, 4)
    held = host.executor.launch(host.step([(0, [5, 6])], fresh=True, constrained=True))
    held.sample(None)
    assert column(await held) == continued(decoder, [5, 6], 1)
    await host.executor.close()


async def test_unconstrained_step_takes_no_mask(decoder: Decoder) -> None:
    host = Host(decoder, 4)
    handle = host.executor.launch(host.step([(0, [5, 6])], fresh=True))
    with pytest.raises(RuntimeError, match="waits for no mask"):
        handle.sample(None)
    await host.executor.close()


async def test_sequence_and_depth_are_enforced(decoder: Decoder) -> None:
    host = Host(decoder, 4, depth=2, late_s=0.05)
    step = host.step([(0, [1])], fresh=True)
    with pytest.raises(RuntimeError, match="1 is next"):
        host.executor.launch(Step(7, step.plans))
    handles = [host.executor.launch(step), host.executor.launch(host.step([(0, None)]))]
    with pytest.raises(RuntimeError, match="in flight"):
        host.executor.launch(host.step([(0, None)]))
    for handle in handles:
        await handle
    await host.executor.close()


async def test_step_that_raises_reports_it_and_the_next_one_runs(decoder: Decoder) -> None:
    host = Host(decoder, 4)
    bad = host.executor.launch(host.step([(0, [VOCAB + 5])], fresh=True))
    host.length[0] = 0
    good = host.executor.launch(host.step([(0, [4, 2])], fresh=True))
    with pytest.raises(IndexError):
        await bad
    assert column(await good) == continued(decoder, [4, 2], 1)
    assert host.executor.is_alive()
    await host.executor.close()


async def test_constrained_step_whose_forward_raised_still_takes_its_mask(
    decoder: Decoder,
) -> None:
    host = Host(decoder, 4)
    bad = host.executor.launch(host.step([(0, [VOCAB])], fresh=True, constrained=True))
    with pytest.raises(IndexError):
        await bad
    bad.sample(None)
    host.length[0] = 0
    good = host.executor.launch(host.step([(0, [4, 2])], fresh=True))
    assert column(await good) == continued(decoder, [4, 2], 1)
    await host.executor.close()


async def test_closed_executor_takes_no_step_and_closes_again(decoder: Decoder) -> None:
    host = Host(decoder, 4)
    last = host.executor.launch(host.step([(0, [1])], fresh=True))
    await host.executor.close()
    assert column(await last) == continued(decoder, [1], 1)
    await host.executor.close()
    assert not host.executor.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        host.executor.launch(host.step([(0, None)]))


async def test_rows_of_the_head_without_a_token_are_never_sampled(decoder: Decoder) -> None:
    host = Host(decoder, 4, num_token_ids=40)
    rows = [(slot, [1, 2, 3 + slot]) for slot in range(4)]
    steps = [host.step(rows, fresh=True, temperature=50.0)]
    steps += [host.step([(slot, None) for slot in range(4)], temperature=50.0) for _ in range(20)]
    drawn = [token for step in steps for token in column(await host.executor.launch(step))]
    assert max(drawn) < 40 and len(set(drawn)) > 15
    await host.executor.close()


@pytest.mark.parametrize("num_token_ids", [None, VOCAB - 1])
async def test_banned_tokens_are_not_drawn_and_hurt_no_other_row(
    decoder: Decoder, num_token_ids: int | None
) -> None:
    host = Host(decoder, 4, num_token_ids=num_token_ids)
    prompts = [[7, 3, 9], [1, 2], [7, 3, 9]]
    step = host.step(
        [(slot, prompt) for slot, prompt in enumerate(prompts)],
        samples=[True, False, True],
        fresh=True,
    )
    free = continued(decoder, prompts[0], 1)[0]
    banned = (np.array([2, 2]), np.array([free, VOCAB - 1]))  # the last may have no token
    plan = replace(step.plan, sampling=replace(step.plan.sampling, banned=banned))
    result = await host.executor.launch(Step(step.seq, (plan,)))
    assert result.token_ids[0, 0] == free and result.token_ids[2, 0] != free
    await host.executor.close()


async def test_seeded_draws_repeat_and_differ_between_seeds(decoder: Decoder) -> None:
    host = Host(decoder, 4)
    drawn = []
    for _ in range(2):
        host.length = [0] * 4
        rows = [(slot, [1, 2, 3]) for slot in range(4)]
        steps = [host.step(rows, fresh=True, temperature=3.0)]
        steps += [host.step([(slot, None) for slot in range(4)], temperature=3.0) for _ in range(8)]
        drawn.append([column(await host.executor.launch(step)) for step in steps])
    assert drawn[0] == drawn[1]
    assert len({tuple(row) for row in np.array(drawn[0]).T.tolist()}) == 4
    await host.executor.close()
