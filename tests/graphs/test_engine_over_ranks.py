"""An engine over several ranks answers as one rank does: any model, any load, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_engine import BUCKETS, Machine

from treadle.engine import Completion, Engine, RequestOutput, SamplingParams
from treadle.graphs.arena import HostArena
from treadle.graphs.step import MEMORY_TAGS
from treadle.kernels import host
from treadle.tools.tiny_model import ARCHITECTURES, VOCAB_SIZE, make_folder

SIZES: dict[str, object] = {
    "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
EXTRA: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
}
KINDS = [  # ranks, whether there are graphs
    pytest.param((1, False), id="1 rank"),
    pytest.param((1, True), id="1 rank, graphs"),
    pytest.param((2, False), id="2 ranks"),
    pytest.param((2, True), id="2 ranks, graphs"),
]
PRESSURE = [
    {"chunked_prefill_size": 16},
    {"chunked_prefill_size": 5, "admission": "sglang", "enable_mixed_chunk": True},
    {"disable_overlap_schedule": True, "disable_radix_cache": True},
]


@contextmanager
def a_machine(folder: Path, ranks: int = 1, *, has_graphs: bool = False) -> Iterator[Machine]:
    machine = Machine(folder, ranks, has_graphs=has_graphs)
    try:
        yield machine
    finally:
        asyncio.run(machine.close())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(
        tmp_path_factory.mktemp("model"), overrides={**SIZES, "head_dim": 16}, seed=7
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Machine]:
    """One rank without graphs: what all others are compared with."""
    with a_machine(folder) as machine:
        yield machine


@pytest.fixture(scope="module", params=KINDS)
def machine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Machine]:
    ranks, has_graphs = request.param
    with a_machine(folder, ranks, has_graphs=has_graphs) as machine:
        yield machine


def some_prompts(count: int, longest: int = 60) -> list[list[int]]:
    """Every other one begins as the first does."""
    first = [random.randrange(VOCAB_SIZE) for _ in range(longest)]
    prompts = [first]
    while len(prompts) < count:
        head = first[: random.randrange(longest // 2)] if len(prompts) % 2 else []
        tail = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, longest // 2))]
        prompts.append([*head, *tail])
    return prompts


async def reference(
    alone: Machine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Tokens of one rank with nothing to share and room for everything, one after the other."""
    async with Engine(alone.parts(disable_radix_cache=True)) as engine:
        found = [await engine.generate(*each) for each in zip(prompts, params, strict=True)]
    return [each.token_ids for each in found]


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    ("arch", "ranks", "kv_heads"),
    [
        *((arch, 2, 2) for arch in ARCHITECTURES),
        ("qwen2", 3, 1),  # one kv head, on all ranks
        pytest.param("qwen3", 3, 3, marks=pytest.mark.slow),
        pytest.param("llama", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_those_of_one_rank(
    tmp_path: Path, arch: str, ranks: int, kv_heads: int
) -> None:
    overrides = {**SIZES, **EXTRA[arch], "num_key_value_heads": kv_heads}
    folder = make_folder(tmp_path, arch, overrides=overrides, seed=random.randrange(1000))
    prompts = some_prompts(6)
    params = [SamplingParams(24, temperature=0, ignore_eos=True)] * len(prompts)

    async def answers(machine: Machine) -> list[list[int]]:
        async with Engine(machine.parts(chunked_prefill_size=16)) as engine:
            return tokens_of(await engine.generate(prompts, params))

    with a_machine(folder) as alone:
        expected = asyncio.run(reference(alone, prompts, params))
    with a_machine(folder, ranks, has_graphs=True) as machine:
        assert asyncio.run(answers(machine)) == expected


@pytest.mark.parametrize("flags", PRESSURE, ids=lambda flags: ", ".join(flags))
async def test_load_retraction_and_aborts_change_no_token(
    alone: Machine,
    machine: Machine,
    flags: dict[str, object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Draws with seeds beside greedy rows, in a pool that holds a part of them."""
    prompts = some_prompts(10, longest=40)
    params = [
        SamplingParams(48, temperature=row % 3 / 2, sampling_seed=row)
        for row in range(len(prompts))
    ]
    expected = await reference(alone, prompts, params)
    parts = machine.parts(tokens=200, schedule_conservativeness=0.01, **flags)
    async with Engine(parts) as engine:
        got: list[list[RequestOutput]] = [[] for _ in prompts]
        sinks = [deltas.append for deltas in got]
        rids = [engine.submit(*each) for each in zip(prompts, params, sinks, strict=True)]
        async with asyncio.timeout(60):
            while "Retract requests" not in caplog.text:
                assert not all(map(is_over, got))
                await asyncio.sleep(0.001)
            running = [row for row, deltas in enumerate(got) if not is_over(deltas)]
            aborted = random.sample(running, 3)
            for row in aborted:
                engine.abort(rids[row])
            while not all(map(is_over, got)):
                await asyncio.sleep(0.001)
        for row, (deltas, tokens) in enumerate(zip(got, expected, strict=True)):
            found = [token for delta in deltas for token in delta.token_ids]
            if row in aborted:  # perhaps in the step that ended it anyway
                assert found == tokens[: len(found)]
            else:
                assert found == tokens
        again = await engine.generate(prompts[0], params[0])  # what is cached by now is right
        assert again.token_ids == expected[0]
    engine.scheduler.check_integrity()


def is_over(deltas: Sequence[RequestOutput]) -> bool:
    return bool(deltas) and deltas[-1].finish_reason is not None


async def test_draws_without_a_seed_are_the_same_on_all_ranks(machine: Machine) -> None:
    """Each step's tokens are compared between the ranks; two runs draw apart."""
    prompts = some_prompts(8)
    params = SamplingParams(30, temperature=1.5, ignore_eos=True)
    async with Engine(machine.parts(chunked_prefill_size=16)) as engine:
        one, other = [tokens_of(await engine.generate(prompts, params)) for _ in range(2)]
    assert one != other
    assert {token >= VOCAB_SIZE // 2 for answer in one for token in answer} == {False, True}


async def test_banned_tokens_are_banned_on_all_ranks(alone: Machine, machine: Machine) -> None:
    """What would come first is banned for a while, whichever rank has it."""
    prompts = some_prompts(6)
    free = await reference(
        alone, prompts, [SamplingParams(12, temperature=0, ignore_eos=True)] * len(prompts)
    )
    params = [
        SamplingParams(
            20, temperature=row % 2, sampling_seed=row, min_new_tokens=9,
            stop_token_ids=tuple(tokens),
        )
        for row, tokens in enumerate(free)
    ]  # fmt: skip
    expected = await reference(alone, prompts, params)
    for found, tokens, each in zip(expected, free, params, strict=True):
        assert not {*found[:9]} & {*each.stop_token_ids} and found[0] != tokens[0]
    async with Engine(machine.parts(chunked_prefill_size=16)) as engine:
        assert tokens_of(await engine.generate(prompts, params)) == expected
    engine.scheduler.check_integrity()


@pytest.mark.skipif(not HostArena.can_release, reason="only Linux takes memory back from a host")
@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights", "cuda_graph"]])
async def test_answers_go_on_after_memory_was_away(
    alone: Machine, machine: Machine, tags: list[str] | None
) -> None:
    prompts = some_prompts(4)
    params = [
        SamplingParams(40, temperature=row % 2, ignore_eos=True, sampling_seed=row)
        for row in range(len(prompts))
    ]
    expected = await reference(alone, prompts, params)
    async with Engine(machine.parts(chunked_prefill_size=16)) as engine:
        running = asyncio.create_task(engine.generate(prompts, params))
        while engine.load().num_used_tokens < sum(map(len, prompts)) + 20:
            await asyncio.sleep(0)
        await engine.release_memory_occupation(tags)
        if "weights" in (tags or MEMORY_TAGS):
            assert not machine.local.runner._programs.decoder.embedding.any()
        steps = machine.num_steps
        await asyncio.sleep(0.05)
        assert machine.num_steps == steps and not running.done()
        await engine.resume_memory_occupation(tags)
        assert tokens_of(await running) == expected
        assert tokens_of(await engine.generate(prompts, params)) == expected
    engine.scheduler.check_integrity()


async def test_steps_replay_what_all_ranks_have_captured(machine: Machine) -> None:
    report = machine.executor.graphs()
    if not report.planned["decode"]:
        assert not any(report.captured.values())
    elif host.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    else:
        async with asyncio.timeout(30):  # a test before may have released them
            while machine.executor.graphs().captured != {
                "decode": BUCKETS.decode_rows,
                "prefill": BUCKETS.prefill_tokens,
            }:
                await asyncio.sleep(0.01)
