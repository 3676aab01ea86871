"""One engine over several processes gives the tokens of one process, whatever is asked of it."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rank_host import VOCAB, RankedHost, a_plan, alone, start, write_model

from treadle.graphs.buckets import Buckets
from treadle.graphs.followers import Team
from treadle.graphs.rank_plan import Allocation, Layout, RankPlan
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.step import MEMORY_TAGS, Step
from treadle.kernels import host as host_kernels

BUCKETS = Buckets((1, 2, 4), (8, 16))
SLOTS = 4
Engine = tuple[RankedHost, RankedExecutor, Team]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Engine]:
    engine = start(a_plan(folder, 2, is_debug=True), buckets=BUCKETS)
    yield engine
    assert engine[1].is_alive()
    asyncio.run(engine[1].close())
    assert exit_codes(engine[2]) == [0]


def exit_codes(team: Team) -> list[int | None]:
    return [process.returncode for process in team.processes]


def some_steps(prompts: Sequence[Sequence[int]], count: int) -> Callable[[RankedHost], list[Step]]:
    """A prefill of some rows, decodes, a mixed step, decodes that draw."""

    def make(host: RankedHost) -> list[Step]:
        first = list(enumerate(prompts[:-1]))
        rows = [(slot, None) for slot in range(len(prompts) - 1)]
        steps = [host.step(first, fresh=True)] + [host.step(rows) for _ in range(count)]
        host.length[len(rows)] = 0
        steps.append(host.step([(len(rows), prompts[-1]), *rows]))
        rows.append((len(rows), None))
        steps += [host.step(rows) for _ in range(count)]
        return steps + [host.step(rows, temperature=2.0) for _ in range(count)]

    return make


def some_prompts(rows: int = 3) -> list[list[int]]:
    return [[random.randrange(VOCAB) for _ in range(random.randrange(1, 9))] for _ in range(rows)]


@pytest.mark.parametrize(
    ("size", "kv_heads"), [(2, 4), (3, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
async def test_tokens_are_those_of_one_rank(tmp_path: Path, size: int, kv_heads: int) -> None:
    folder = write_model(tmp_path / "model", kv_heads)
    host, executor, team = start(a_plan(folder, size, is_debug=True), buckets=BUCKETS)
    single = alone(folder, buckets=BUCKETS)
    try:
        for _ in range(2):
            make = some_steps(some_prompts(), 8)
            assert await host.tokens(make(host)) == await single.tokens(make(single))
            await asyncio.to_thread(executor.prepare, all_graphs=True)  # then by replay
        if host_kernels.LIBRARY is not None:
            assert executor.graphs().captured["decode"] == BUCKETS.decode_rows
        assert executor.is_alive()  # each step's digest was the same on all ranks
    finally:
        await executor.close()
        await single.ranked.close()
    assert exit_codes(team) == [0] * (size - 1)


async def test_constrained_and_banned_tokens_are_kept_from_all_ranks(pair: Engine) -> None:
    host, executor, _ = pair
    allowed = [3, VOCAB // 2 + 2, VOCAB - 1]
    mask = np.zeros((2, VOCAB), dtype=np.bool_)
    mask[:, allowed] = True
    held = executor.launch(host.step([(0, [1, 2]), (1, [5])], fresh=True, constrained=True))
    held.sample(mask)
    assert {*(await held).token_ids[:, 0].tolist()} <= {*allowed}
    for _ in range(4):
        held = executor.launch(
            host.step([(0, None), (1, None)], constrained=True, temperature=100.0)
        )
        held.sample(mask)
        assert {*(await held).token_ids[:, 0].tolist()} <= {*allowed}
    kept = np.array([4, VOCAB - 2])
    others = np.setdiff1d(np.arange(VOCAB), kept)
    for _ in range(4):
        step = host.step([(0, None), (1, None)], temperature=100.0)
        banned = (np.repeat([0, 1], len(others)), np.tile(others, 2))
        plan = replace(step.plan, sampling=replace(step.plan.sampling, banned=banned))
        result = await executor.launch(Step(step.seq, (plan,)))
        assert {*result.token_ids[:, 0].tolist()} <= {*kept.tolist()}


async def test_memory_goes_and_comes_on_all_ranks(pair: Engine, folder: Path) -> None:
    host, executor, _ = pair
    single = alone(folder)
    make = some_steps(some_prompts(), 4)
    expected = await single.tokens(make(single))
    assert await host.tokens(make(host)) == expected
    await executor.release(MEMORY_TAGS)
    await executor.resume(MEMORY_TAGS)
    assert await host.tokens(make(host)) == expected
    await single.ranked.close()


async def test_large_frames_arrive_whole_and_in_order(pair: Engine) -> None:
    host, executor, team = pair
    held = executor.launch(host.step([(0, [1, 2])], fresh=True, constrained=True))
    held.sample(np.ones((1, VOCAB), dtype=np.bool_))
    first = (await held).token_ids.tolist()
    wide = np.ones((1, 30_000_000), dtype=np.bool_)  # more than the stream takes at once
    host.length[0] = 0
    held = executor.launch(host.step([(0, [1, 2])], fresh=True, constrained=True))
    held.sample(wide)
    after = executor.launch(host.step([(0, None)]))
    assert (await held).token_ids.tolist() == first
    await after
    deadline = asyncio.get_running_loop().time() + 10
    while team.progress(1)[1] < host.seq and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    assert team.progress(1)[1] == host.seq


async def test_graph_that_one_rank_cannot_capture_is_used_by_none(folder: Path) -> None:
    host, executor, _ = start(a_plan(folder, 2), buckets=BUCKETS, fault="1:capture:")
    try:
        await asyncio.to_thread(executor.prepare, all_graphs=True)
        assert not any(executor.graphs().captured.values())
        make = some_steps(some_prompts(), 3)
        single = alone(folder)
        assert await host.tokens(make(host)) == await single.tokens(make(single))
        await single.ranked.close()
        assert executor.is_alive()
    finally:
        await executor.close()


async def test_graphs_are_captured_in_the_background_of_all_ranks(pair: Engine) -> None:
    if host_kernels.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    host, executor, _ = pair
    async with asyncio.timeout(30):
        while executor.graphs().captured != {"decode": (1, 2, 4), "prefill": (8, 16)}:
            await asyncio.sleep(0.01)
    await executor.launch(host.step([(0, [1, 2, 3])], fresh=True))
    assert (await executor.launch(host.step([(0, None)]))).replayed


async def test_ranks_that_come_by_themselves_are_taken_and_strangers_are_not(folder: Path) -> None:
    layout = Layout(2, num_nodes=2, init_address=f"127.0.0.1:{free_port()}")
    joiner = asyncio.create_task(
        asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "treadle.graphs.rank_main", "--rank", "1",
            "--join", str(layout.init_address), "--timeout", "30",
        )
    )  # fmt: skip
    host, executor, _ = await asyncio.to_thread(start, a_plan(folder, 2), layout=layout)
    process = await joiner
    try:
        await host.tokens(some_steps(some_prompts(), 2)(host))
    finally:
        await executor.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0


def test_an_engine_starts_from_a_script_on_standard_input(folder: Path) -> None:
    script = """
import asyncio, sys
from pathlib import Path
from rank_host import a_plan, start
async def main():
    host, executor, _ = start(a_plan(Path(sys.argv[1]), 2))
    print(await host.tokens([host.step([(0, [1, 2, 3])], fresh=True)]))
    await executor.close()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-", str(folder)], input=script, capture_output=True, text=True,
        timeout=60, env=with_support(), cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[[") and not done.stderr


LAUNCHED = """
import asyncio, os, sys
from pathlib import Path
from rank_host import a_plan, start
from treadle.graphs.rank_main import follow_all, leave
from treadle.graphs.rank_plan import Layout

async def main(layout):
    host, executor, _ = start(a_plan(Path(sys.argv[1]), layout.size), layout=layout)
    print("tokens", await host.tokens([host.step([(0, [1, 2, 3])], fresh=True)]))
    await executor.close()

layout = Layout.from_torchrun(os.environ) or Layout(
    2, num_nodes=2, node_rank=int(sys.argv[2]), init_address=sys.argv[3], timeout_s=30
)
if layout.leads:
    asyncio.run(main(layout))
else:
    leave(follow_all(layout, "cpu"))
"""


@pytest.mark.slow
def test_an_engine_starts_through_torchrun(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(LAUNCHED)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "--master-port", str(free_port()), str(script), str(folder)],
        capture_output=True, text=True, timeout=90, env=with_support(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens [[") == 1


def test_an_engine_starts_over_two_nodes(folder: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHED, str(folder), str(node), address],
            stdout=subprocess.PIPE, text=True, env=with_support(),
        )
        for node in (1, 0)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert outputs[0] == "" and outputs[1].startswith("tokens [[")


def with_support() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}


def test_plans_survive_their_journey() -> None:
    plan = RankPlan(
        1, 4, "cuda:3", "[::1]:80", "/m", "auto", "bfloat16", 9, 7, (("decode", "triton"),)
    )
    assert RankPlan.from_json(plan.to_json()) == plan
    allocation = Allocation(16, 9, 4, 64, 97, 2, (1, 2), (8,), num_token_ids=90)
    assert Allocation.from_json(allocation.to_json()) == allocation


@pytest.mark.parametrize(
    ("layout", "spawned", "device"),
    [
        (Layout(4), (1, 2, 3), "cuda:2"),
        (Layout(4, num_nodes=2, init_address="a:1"), (1,), "cuda:0"),
        (Layout(4, base_gpu_id=4), (1, 2, 3), "cuda:6"),
        (Layout(4, is_launched=True, rank=2, local_rank=2), (), "cuda:2"),
    ],
)
def test_ranks_are_laid_out_over_nodes(
    layout: Layout, spawned: tuple[int, ...], device: str
) -> None:
    layout.check()
    assert layout.spawned == spawned and layout.device("cuda", 2) == device
    assert layout.device("cpu", 2) == "cpu"


@pytest.mark.parametrize(
    "layout",
    [Layout(3, num_nodes=2, init_address="a:1"), Layout(2, node_rank=1), Layout(4, num_nodes=2)],
)
def test_layout_that_cannot_be_is_refused(layout: Layout) -> None:
    with pytest.raises(ValueError):
        layout.check()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
