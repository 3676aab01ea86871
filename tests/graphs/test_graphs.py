"""Captured graphs against the same bodies run eagerly, on every backend that the machine has."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from plan_host import SPEC, VOCAB, Host, column, continued, make_decoder

from treadle.graphs.arena import HostArena
from treadle.graphs.assemble import ExecutorOptions
from treadle.graphs.backends import CaptureError, Eager, Graph, GraphBackend, HostGraphs
from treadle.graphs.buckets import Buckets, GraphKey
from treadle.graphs.device import HostDevice
from treadle.graphs.models.decoder import Decoder
from treadle.graphs.models.spec import RopeSpec
from treadle.graphs.step import GraphChoice, Step, StepResult
from treadle.kernels import host as host_kernels

BUCKETS = Buckets((1, 2, 4, 8), (4, 8, 16, 32))
ODD = replace(  # torch multiplies, between tapes of the host's kernels
    SPEC, num_heads=3, num_kv_heads=1, head_dim=16, rope=RopeSpec(10000.0, 16)
)
WIDE = replace(  # every kernel of the host serves it, also those for multiples of 16 and 32
    SPEC, hidden_size=64, num_heads=4, head_dim=16, intermediate_size=96, vocab_size=112,
    rope=RopeSpec(10000.0, 16), qk_norm=True, tied_head=True, windows=(None, 9),
)  # fmt: skip
MODELS: dict[str, Callable[[], Decoder]] = {
    "odd sizes, fp32": lambda: make_decoder(ODD),
    "even sizes, fp32": lambda: make_decoder(WIDE),
    "even sizes, bf16": lambda: make_decoder(WIDE, torch.bfloat16),
    "gelu": lambda: make_decoder(replace(WIDE, activation="gelu_tanh")),
}


def host_graphs() -> GraphBackend:
    if host_kernels.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    return HostGraphs(HostArena(), 1 << 24)


BACKENDS: dict[str, Callable[[], GraphBackend]] = {"eager": Eager, "host": host_graphs}


def a_host(decoder: Decoder, backend: GraphBackend, page_size: int = 4, **options: Any) -> Host:
    chosen = ExecutorOptions(**{"buckets": BUCKETS, "backend": backend, **options})
    return Host(decoder, page_size, slots=8, options=chosen)


def never_captured(decoder: Decoder, page_size: int = 4) -> Host:
    """Runs the same padded bodies, and never a graph."""
    return a_host(decoder, Eager(), page_size, in_background=False)


@dataclass
class Played:
    """What a host's steps gave: tokens, logits of the rows that sampled, and how they ran."""

    tokens: list[list[int]]
    logits: list[torch.Tensor]
    replayed: list[bool]


class Player:
    """Runs steps one after the other and keeps what came of them."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.played = Played([], [], [])
        runner = host.executor.runner
        forward = runner.forward

        def keep(step: Step) -> Any:
            forwarded = forward(step)
            rows = len(forwarded.sampling_rows)
            self.played.logits.append(forwarded.outputs.logits[:rows].clone())
            return forwarded

        runner.forward = keep  # type: ignore[method-assign]

    async def run(self, *arguments: Any, **keywords: Any) -> StepResult:
        result = await self.host.executor.launch(self.host.step(*arguments, **keywords))
        self.played.tokens.append(column(result))
        self.played.replayed.append(result.replayed)
        return result


async def a_story(player: Player, seed: int) -> Played:
    """Prompts in chunks, decodes of every row count, and both in one step, over page borders."""
    rng = random.Random(seed)
    vocab = player.host.executor.capacity.vocab_size

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    def rows(slots: Sequence[int]) -> list[tuple[int, None]]:
        return [(slot, None) for slot in slots]

    for slot in range(8):
        await player.run([(slot, prompt(rng.randint(1, 7)))], fresh=True)
    for count in [1, 2, 3, 4, 5, 8, 6]:
        await player.run(rows(rng.sample(range(8), count)), temperature=rng.choice([0.0, 2.0]))
    mixed = [(1, None), (3, prompt(5)), (6, None), (7, prompt(rng.randint(2, 12)))]
    await player.run(mixed, samples=[True, False, True, True])
    await player.run([(3, prompt(9)), (0, None), (2, None)])
    await player.run([(4, prompt(6))], samples=[False])
    for _ in range(6):  # over the border of a page
        await player.run(rows(range(8)), temperature=1.0)
    return player.played


def assert_same(found: Played, expected: Played) -> None:
    assert found.tokens == expected.tokens
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_replay_equals_the_eager_body_bit_for_bit(
    backend: str, model: str, page_size: int
) -> None:
    decoder = MODELS[model]()
    eager = never_captured(decoder, page_size)
    captured = a_host(decoder, BACKENDS[backend](), page_size)
    captured.executor.prepare(all_graphs=True)
    report = captured.executor.graphs()
    assert report.captured == {"decode": (1, 2, 4, 8), "prefill": (4, 8, 16, 32)}
    expected, found = await a_story(Player(eager), 1), await a_story(Player(captured), 1)
    assert_same(found, expected)
    assert not any(expected.replayed) and all(found.replayed)
    for each in (eager, captured):
        await each.executor.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_padding_changes_no_greedy_token(backend: str) -> None:
    decoder = make_decoder(ODD)
    host = a_host(decoder, BACKENDS[backend]())
    host.executor.prepare(all_graphs=True)
    player = Player(host)
    prompts = {slot: [slot + 1, 7, 3 * slot + 2] for slot in (0, 2, 5)}
    await player.run([(slot, prompt) for slot, prompt in prompts.items()], fresh=True)
    for _ in range(6):
        await player.run([(slot, None) for slot in prompts])
    for row, prompt in enumerate(prompts.values()):
        assert [step[row] for step in player.played.tokens] == continued(decoder, prompt, 7)
    await host.executor.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_capture_in_the_middle_of_a_stream_changes_no_bit(backend: str) -> None:
    decoder = MODELS["even sizes, bf16"]()
    swapped = a_host(decoder, BACKENDS[backend](), in_background=False)
    eager = never_captured(decoder)
    players = Player(swapped), Player(eager)
    for place in range(12):
        for player in players:
            if place == 0:
                rows: list[Any] = [(slot, [1, 5, 9 + slot]) for slot in range(3)]
                await player.run(rows, fresh=True)
            else:
                await player.run([(slot, None) for slot in range(3)], temperature=1.0)
        if place == 5:
            swapped.executor.prepare(all_graphs=True)
    assert_same(players[0].played, players[1].played)
    assert players[0].played.replayed == [False] * 6 + [True] * 6
    for each in (swapped, eager):
        await each.executor.close()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_late_masks_and_bans_between_the_two_halves_of_a_step(
    backend: str, page_size: int
) -> None:
    decoder = make_decoder(ODD)
    results = []
    for captures in (True, False):
        if captures:
            host = a_host(decoder, BACKENDS[backend](), page_size)
            host.executor.prepare(all_graphs=True)
        else:
            host = never_captured(decoder, page_size)
        player = Player(host)
        first = column(await player.run([(0, [1, 2, 3]), (1, [4, 5])], fresh=True))
        held = host.executor.launch(host.step([(0, None), (1, None)], constrained=True))
        mask = np.zeros((2, VOCAB), dtype=np.bool_)
        mask[0, 5:9] = mask[1, 40] = True
        held.sample(mask)
        late = column(await held)
        assert 5 <= late[0] < 9 and late[1] == 40
        step = host.step([(1, None), (0, None)])
        banned = (np.array([1, 1]), np.array([3, 4]))
        plan = replace(step.plan, sampling=replace(step.plan.sampling, banned=banned))
        held = host.executor.launch(Step(step.seq, (plan,)))
        ban = column(await held)
        assert ban[1] not in (3, 4)
        prompt = host.step([(2, [6, 6, 1, 2])], fresh=True, constrained=True)
        held = host.executor.launch(prompt)
        held.sample(None)  # a grammar that failed: nothing is restricted, nobody waits
        results.append(
            [first, late, ban, column(await held), column(await player.run([(2, None)]))]
        )
        await host.executor.close()
    assert results[0] == results[1]


class WarmingUp(Eager):
    """Runs every body once before it is captured, as a GPU does."""

    needs_warm_up = True


async def test_capture_waits_while_logits_wait_for_their_mask() -> None:
    decoder = make_decoder(ODD)
    host = a_host(decoder, WarmingUp())
    host.executor.prepare(all_graphs=False)
    prompt = [5, 4, 3]
    held = host.executor.launch(host.step([(0, prompt)], fresh=True, constrained=True))
    await asyncio.sleep(0.2)  # long enough for several captures
    before = host.executor.graphs()
    held.sample(None)
    assert column(await held) == continued(decoder, prompt, 1)
    assert sum(map(len, before.captured.values())) == 1
    await host.executor.close()


async def test_replay_runs_no_code_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = MODELS["even sizes, bf16"]()
    host = a_host(decoder, host_graphs())
    host.executor.prepare(all_graphs=True)
    player = Player(host)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("code of the model ran")

    await player.run([(slot, [3, slot]) for slot in range(4)], fresh=True)
    monkeypatch.setattr(Decoder, "piece", refuse)
    monkeypatch.setattr(Decoder, "logits", refuse)
    await player.run([(4, [1, 2, 3]), (0, None)])  # attention runs between the pieces
    monkeypatch.setattr(Decoder, "attend", refuse)
    for count in range(1, 6):
        await player.run([(slot, None) for slot in range(count)])
    assert all(player.played.replayed)
    await host.executor.close()


async def test_replay_moves_no_address_and_allocates_nothing() -> None:
    decoder = MODELS["even sizes, bf16"]()
    host = a_host(decoder, host_graphs())
    host.executor.prepare(all_graphs=True)
    player = Player(host)
    await player.run([(slot, [3, slot]) for slot in range(8)], fresh=True)
    table = host.executor.runner.graphs
    keys = [GraphKey("decode", 8, 8), GraphKey("head", 8, 8), GraphKey("sample", 8, 8)]
    before = words_of(table, keys)
    for _ in range(3):
        await player.run([(slot, None) for slot in range(8)])
    tracemalloc.start()
    try:
        for key in keys:
            table.replay(key)
        at_start = tracemalloc.take_snapshot()
        for _ in range(200):
            for key in keys:
                table.replay(key)
        at_end = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = [tracemalloc.Filter(True, "*kernels/tape.py"), tracemalloc.Filter(True, "*graphs/*")]
    grown = at_end.filter_traces(ours).compare_to(at_start.filter_traces(ours), "lineno")
    assert sum(each.size_diff for each in grown) == 0, grown
    assert words_of(table, keys) == before
    await host.executor.close()


def words_of(table: Any, keys: Sequence[GraphKey]) -> list[list[int]]:
    """The addresses and sizes of every call on the keys' tapes."""
    parts = [part for key in keys for part in table._graphs[key][0].replay.__self__._playable]
    return [part._words.tolist() for part in parts]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_padded_rows_touch_nothing_real(backend: str) -> None:
    decoder = make_decoder(ODD)
    host = a_host(decoder, BACKENDS[backend]())
    host.executor.prepare(all_graphs=True)
    player = Player(host)
    await player.run([(slot, [1, 2, slot]) for slot in range(8)], fresh=True)
    kv = [(k.clone(), v.clone()) for k, v in host.memory.layers]
    state = host.executor.runner._state
    length, last = state.length.clone(), state.last_token.clone()
    table = state.page_table.clone()
    await player.run([(6, None), (1, None), (4, None)])  # of 4 rows one is padding
    await player.run([(3, [5, 6, 7, 8, 9])])  # of 8 tokens three are
    real = host.memory.group.tokens
    for (k, v), (k_before, v_before) in zip(host.memory.layers, kv, strict=True):
        for now, then in ((k, k_before), (v, v_before)):
            same = (now[:real] == then[:real]) | (now[:real].isnan() & then[:real].isnan())
            assert int((~same.all(dim=2).all(dim=1)).sum()) == 3 + 5
    expected = length + torch.tensor([0, 1, 0, 5, 1, 0, 1, 0, 0])
    assert state.length.tolist() == expected.tolist() and state.length[-1] == 0
    untouched = [0, 2, 5, 7]
    assert state.last_token[untouched].tolist() == last[untouched].tolist()
    assert state.page_table[untouched].tolist() == table[untouched].tolist()
    assert set(state.page_table[-1].tolist()) == {host.memory.group.pages}
    await host.executor.close()


async def test_beyond_the_ladder_steps_run_in_their_own_shape() -> None:
    decoder = make_decoder(ODD)
    host = a_host(decoder, host_graphs(), buckets=Buckets((1, 2), (4, 8)))
    host.executor.prepare(all_graphs=True)
    player = Player(host)
    prompts = [[slot, 2, 9, slot] for slot in range(5)]
    await player.run([(slot, prompt) for slot, prompt in enumerate(prompts)], fresh=True)
    for _ in range(3):
        await player.run([(slot, None) for slot in range(5)])
    assert not any(player.played.replayed)
    for row, prompt in enumerate(prompts):
        assert [step[row] for step in player.played.tokens] == continued(decoder, prompt, 4)
    await host.executor.close()


async def test_without_padding_a_decode_must_fit_its_graph() -> None:
    host = a_host(make_decoder(ODD), host_graphs(), buckets=Buckets((1, 2, 4), (8,), padding=False))
    host.executor.prepare(all_graphs=True)
    player = Player(host)
    await player.run([(slot, [slot, 1]) for slot in range(4)], fresh=True)
    for count in (1, 2, 3, 4):
        await player.run([(slot, None) for slot in range(count)])
    assert player.played.replayed[1:] == [True, True, False, True]
    await host.executor.close()


class Refusing:
    """A backend that can capture some things only."""

    name = "cpu graph"
    needs_warm_up = False

    def __init__(self, inner: GraphBackend, captures: int) -> None:
        self._inner = inner
        self._captures = captures

    def capture(self, body: Callable[[], None]) -> Graph:
        self._captures -= 1
        if self._captures < 0:
            raise CaptureError("no more of them")
        return self._inner.capture(body)

    def synchronize(self) -> None:
        self._inner.synchronize()

    def num_bytes(self) -> int:
        return self._inner.num_bytes()

    def clear(self) -> None:
        self._inner.clear()


async def test_what_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    decoder = make_decoder(ODD)
    host = a_host(decoder, Refusing(host_graphs(), captures=1))
    host.executor.prepare(all_graphs=True)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"No graph for {kind}, such steps run eagerly: no more of them"
        for kind in ("prefill tokens=32", "decode bs=1", "head bs=1", "sample bs=1",
                     "decode_split bs=1")
    ]  # fmt: skip
    player = Player(host)
    prompts = [[slot, 2, 9, slot] for slot in range(8)]
    await player.run([(slot, prompt) for slot, prompt in enumerate(prompts)], fresh=True)
    for count in (8, 3, 8):
        await player.run([(slot, None) for slot in range(count)])
    assert player.played.replayed == [False, True, False, True]
    tokens = [step[0] for step in player.played.tokens]
    assert tokens == continued(decoder, prompts[0], 4)
    await host.executor.close()


async def test_the_choice_made_at_launch_is_followed() -> None:
    """A rank that captured more than rank 0 still runs what rank 0 chose."""
    host = a_host(make_decoder(ODD), host_graphs())
    host.executor.prepare(all_graphs=True)
    runner = host.executor.runner

    def refuse(key: GraphKey, part: int = 0) -> None:
        raise AssertionError(f"{key} was replayed")

    runner.graphs.replay = refuse  # type: ignore[method-assign]
    step = host.step([(0, [1, 2, 3])], fresh=True)
    chosen = replace(step, choice=GraphChoice(4, 1, False))
    runner.sample(chosen, runner.forward(chosen), None)
    with pytest.raises(AssertionError, match="prefill tokens=4 was replayed"):
        runner.forward(replace(step, choice=GraphChoice(4, 1, True)))
    await host.executor.close()


async def test_device_that_is_lost_ends_every_step(caplog: pytest.LogCaptureFixture) -> None:
    class Dying(HostDevice):
        lost = False

        def is_lost(self) -> bool:
            return self.lost

    device = Dying()
    host = Host(make_decoder(), device=device)
    good = host.executor.launch(host.step([(0, [1, 2])], fresh=True))
    await good
    runner = host.executor.runner

    def fail(step: Step) -> Any:
        device.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    runner.forward = fail  # type: ignore[method-assign]
    bad = host.executor.launch(host.step([(0, None)]))
    late = host.executor.launch(host.step([(0, None)]))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await bad
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await late
    assert not host.executor.is_alive()
    with pytest.raises(RuntimeError, match="device is lost"):
        host.executor.launch(host.step([(0, None)]))
    assert "The device is lost: an illegal memory access" in caplog.text
    await host.executor.close()


async def test_launch_thread_that_ends_tells_whoever_waits() -> None:
    host = a_host(make_decoder(ODD), host_graphs(), in_background=False)

    def fail(step: Step) -> Any:
        raise SystemExit(3)

    host.executor.runner.forward = fail  # type: ignore[method-assign]
    waiting = host.executor.launch(host.step([(0, [1])], fresh=True))
    with pytest.raises(RuntimeError, match="the launch thread has ended"):
        await waiting
    assert not host.executor.is_alive()
    await host.executor.close()
