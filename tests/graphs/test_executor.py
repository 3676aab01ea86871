"""The device side end to end on a small random model, driven by hand-made plans."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from plan_host import VOCAB, Host, column, continued, make_decoder

from treadle.graphs.assemble import ExecutorOptions
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.step import Step


@pytest.fixture
def decoder() -> Decoder:
    return make_decoder()


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("late_s", [0.0, 0.01])
async def test_overlapped_chunks_and_decodes_equal_fresh_forwards(
    decoder: Decoder, page_size: int, late_s: float
) -> None:
    host = Host(decoder, page_size, late_s, options=ExecutorOptions(depth=3))
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
    host = Host(decoder)
    old = host.executor.launch(host.step([(1, [1, 2, 3, 4, 5])], fresh=True))
    host.length[1] = 0
    new = host.executor.launch(host.step([(1, [9, 8, 7])], fresh=True))
    assert column(await old) == continued(decoder, [1, 2, 3, 4, 5], 1)
    assert column(await new) == continued(decoder, [9, 8, 7], 1)
    await host.executor.close()


async def test_constrained_step_samples_when_its_mask_comes(decoder: Decoder) -> None:
    host = Host(decoder)
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
    host = Host(decoder)
    held = host.executor.launch(host.step([(0, [5, 6])], fresh=True, constrained=True))
    held.sample(None)
    assert column(await held) == continued(decoder, [5, 6], 1)
    await host.executor.close()


async def test_unconstrained_step_takes_no_mask(decoder: Decoder) -> None:
    host = Host(decoder)
    handle = host.executor.launch(host.step([(0, [5, 6])], fresh=True))
    with pytest.raises(RuntimeError, match="waits for no mask"):
        handle.sample(None)
    await host.executor.close()


async def test_sequence_and_depth_are_enforced(decoder: Decoder) -> None:
    host = Host(decoder, 4, 0.05)
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
    host = Host(decoder)
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
    host = Host(decoder)
    bad = host.executor.launch(host.step([(0, [VOCAB])], fresh=True, constrained=True))
    with pytest.raises(IndexError):
        await bad
    bad.sample(None)
    host.length[0] = 0
    good = host.executor.launch(host.step([(0, [4, 2])], fresh=True))
    assert column(await good) == continued(decoder, [4, 2], 1)
    await host.executor.close()


async def test_closed_executor_takes_no_step_and_closes_again(decoder: Decoder) -> None:
    host = Host(decoder)
    last = host.executor.launch(host.step([(0, [1])], fresh=True))
    await host.executor.close()
    assert column(await last) == continued(decoder, [1], 1)
    await host.executor.close()
    assert not host.executor.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        host.executor.launch(host.step([(0, None)]))


async def test_rows_of_the_head_without_a_token_are_never_sampled(decoder: Decoder) -> None:
    host = Host(decoder, options=ExecutorOptions(num_token_ids=40))
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
    host = Host(decoder, options=ExecutorOptions(num_token_ids=num_token_ids))
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
    host = Host(decoder)
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
