"""One engine over several processes gives the tokens of one process, whatever is asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from rank_host import VOCAB, RankedHost, a_plan, alone, fail_once, start, write_model

from treadle.graphs.buckets import Buckets, GraphKey
from treadle.graphs.followers import Team
from treadle.graphs.peer import WORKER
from treadle.graphs.rank_plan import Allocation, Layout, RankPlan
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.rendezvous import Address, Kind, frame, open_store
from treadle.graphs.step import MEMORY_TAGS, MemoryTag, Step
from treadle.kernels import host as host_kernels

BUCKETS = Buckets((1, 2, 4), (8, 16))
SLOTS = 4
WEIGHTS: Final[tuple[MemoryTag, ...]] = ("weights",)
CUDA_GRAPH: Final[tuple[MemoryTag, ...]] = ("cuda_graph",)
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


@pytest.mark.parametrize("rank", [0, 1])
async def test_memory_that_did_not_come_back_can_be_tried_again(folder: Path, rank: int) -> None:
    fault = "1:resume:no file" if rank == 1 else None
    host, executor, _ = start(a_plan(folder, 2), buckets=BUCKETS, fault=fault)
    local = executor._local
    if rank == 0:
        fail_once(local, "no file")
    try:
        await executor.release(WEIGHTS)
        with pytest.raises((RuntimeError, ValueError), match="no file"):
            await executor.resume(WEIGHTS)
        assert not local.may_capture  # a warm-up would meet memory that is not there
        await executor.resume(WEIGHTS)
        assert local.may_capture and executor.is_alive()
        await host.tokens(some_steps(some_prompts(), 2)(host))
    finally:
        await executor.close()
    with pytest.raises(RuntimeError, match="closed"):  # no rank is left to answer
        await asyncio.wait_for(executor.release(WEIGHTS), 10)


async def test_captures_keep_away_from_logits_that_wait_for_their_mask(folder: Path) -> None:
    host, executor, _ = start(a_plan(folder, 2, is_debug=True), buckets=BUCKETS)
    single = alone(folder)
    capture, mask = executor._local.capture, np.zeros((1, VOCAB), dtype=np.bool_)
    mask[0, random.sample(range(VOCAB), 20)] = True
    capture._in_background = False
    await executor.release(CUDA_GRAPH)
    await executor.resume(CUDA_GRAPH)  # now nothing is captured, whatever was before
    try:
        found = []
        for each, asks in ((host, capture.request), (single, lambda _: None)):
            ranked = each.ranked
            held = ranked.launch(each.step([(0, [1, 2, 3])], fresh=True, constrained=True))
            asks(GraphKey("decode", 1, 1))  # refused: what it overwrites is still wanted
            assert capture.is_settled.is_set()
            held.sample(mask)
            asks(GraphKey("decode", 2, 2))  # behind the mask, before the next step
            then = ranked.launch(each.step([(0, None)], constrained=True))
            then.sample(mask)
            found.append([(await held).token_ids.tolist(), (await then).token_ids.tolist()])
        assert found[0] == found[1]
        await asyncio.to_thread(executor.prepare, all_graphs=True)
        assert executor.is_alive()
    finally:
        await executor.close()
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


def hello(**values: object) -> bytes:
    return frame(Kind.HELLO, json.dumps(values).encode())


async def joining(layout: Layout) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "treadle.graphs.rank_main", "--rank", "1",
        "--join", str(layout.init_address), "--timeout", "30",
    )  # fmt: skip


async def test_ranks_that_come_by_themselves_are_taken_and_strangers_are_not(folder: Path) -> None:
    layout = Layout(2, num_nodes=2, init_address=f"127.0.0.1:{free_port()}")
    leading = asyncio.create_task(
        asyncio.to_thread(start, a_plan(folder, 2, timeout_s=30.0), layout=layout)
    )
    store = await asyncio.to_thread(
        open_store, Address.parse(str(layout.init_address)), is_master=False, timeout_s=30
    )
    await asyncio.to_thread(store.wait, ["treadle/commands"])
    told = json.loads(store.get("treadle/commands"))
    token, where = told["token"], (told["host"], told["port"])
    known = hello(token=token, rank=1, device="cpu")
    says = [
        b"", known[:5], known[:30],  # who may still be about to say more; nobody waits for them
        b"GET / HTTP/1.1\r\n\r\n" * 300, random.randbytes(5000), frame(Kind.HELLO, b"[" * 4080),
        hello(token="\u00e9", rank=1, device="cpu"), hello(token="0" * len(token), rank=1),
        hello(token=token, rank=2, device="cpu"), hello(token=token, rank=1e400, device="cpu"),
        frame(Kind.REPORT, known[8:]),
    ]  # fmt: skip
    strangers = [socket.create_connection(where, 5) for _ in says]
    for stranger, said in zip(strangers, says, strict=True):
        stranger.sendall(said)
    process = await joining(layout)
    host, executor, _ = await leading
    try:
        await host.tokens(some_steps(some_prompts(), 2)(host))
        for stranger in strangers:
            with stranger, contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # never a plan
        with pytest.raises(ConnectionRefusedError):  # all ranks are here
            socket.create_connection(where, 5)
    finally:
        await executor.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_ranks_of_other_nodes_leave_when_the_engine_gives_up(folder: Path) -> None:
    layout = Layout(2, num_nodes=2, init_address=f"127.0.0.1:{free_port()}")
    process = await joining(layout)
    team = await asyncio.to_thread(Team, layout, a_plan(folder, 2), "cpu")
    await asyncio.to_thread(team.close, at_once=True)
    assert await asyncio.wait_for(process.wait(), 10) == 1
    assert not team._board._thread.is_alive()


@pytest.mark.slow
def test_address_where_somebody_else_listens_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = (*WORKER, "--join", address, "--rank", "1", "--timeout", "1")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"rank 1: no engine at {address}: " in done.stderr


def test_signals_to_the_whole_group_do_not_end_a_rank_that_still_imports(folder: Path) -> None:
    code = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGTERM)
from treadle.graphs.rank_main import leave, main
leave(main())
"""
    team = Team(Layout(2), a_plan(folder, 2), "cpu", (sys.executable, "-c", code))
    assert team.wait_loaded() > 0
    team.close(at_once=True)


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
    [
        Layout(3, num_nodes=2, init_address="a:1"),
        Layout(2, node_rank=1),
        Layout(4, num_nodes=2),
        Layout(4, num_nodes=2, init_address="a"),
    ],  # fmt: skip
)
def test_layout_that_cannot_be_is_refused(layout: Layout) -> None:
    with pytest.raises(ValueError):
        layout.check()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
