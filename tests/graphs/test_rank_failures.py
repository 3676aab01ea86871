"""A rank that raises, dies, hangs or cannot start: everything ends, soon, and says why."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import rank_host
from rank_host import RankedHost, a_plan, start, write_model

from treadle.graphs.buckets import Buckets, GraphKey
from treadle.graphs.peer import RankError
from treadle.graphs.ranks import RankedExecutor
from treadle.graphs.step import MEMORY_TAGS
from treadle.graphs.watchdog import Watchdog

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ranks") / "model", kv_heads=1)


async def run_until_lost(host: RankedHost, executor: RankedExecutor, count: int) -> RankError:
    """A prefill and decodes, two in flight; every step of a lost engine ends with its error."""
    steps = [host.step([(0, [1, 2, 3, 4])], fresh=True)] + [
        host.step([(0, None)]) for _ in range(count)
    ]
    errors: list[BaseException] = []
    handles = []
    async with asyncio.timeout(20):
        for step in steps:
            try:
                handles.append(executor.launch(step))
            except RuntimeError as error:
                errors.append(error)
                break
            if len(handles) == executor.depth:
                await ended(handles.pop(0), errors)
        for handle in handles:
            await ended(handle, errors)
    assert errors and not executor.is_alive()
    with pytest.raises(RuntimeError, match="lost"):
        executor.launch(host.step([(0, None)]))
    named = [error for error in errors if isinstance(error, RankError)]
    assert named
    return named[0]


async def ended(handle: Any, errors: list[BaseException]) -> bool:
    try:
        await handle
    except Exception as error:
        errors.append(error)
        return False
    return True


@pytest.mark.parametrize("seq", [1, 5])  # a prefill, a decode
@pytest.mark.parametrize(
    ("rank", "what", "says"),
    [
        (1, "raise", r"rank 1: step {seq} failed: ValueError: out of luck"),
        pytest.param(1, "kill", r"rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
        (2, "kill", r"rank 2 was killed by SIGKILL"),
        (1, "exit", r"rank 1 exited with 7"),
    ],
)
async def test_rank_that_fails_ends_every_step_with_its_name(
    folder: Path, seq: int, rank: int, what: str, says: str
) -> None:
    host, executor, team = start(a_plan(folder, 3), fault=f"{rank}:{seq}:{what}")
    try:
        error = await run_until_lost(host, executor, 8)
        assert re.search(says.format(seq=seq), str(error))
        assert re.search(r"\(at step \d+ \((prefill|decode), 1 rows, [14] tokens\)\)", str(error))
        with pytest.raises(RankError):
            await executor.release(MEMORY_TAGS)
    finally:
        await asyncio.wait_for(executor.close(), 10)
    assert all(process.returncode is not None for process in team.processes)


@pytest.mark.parametrize("what", ["hang", "stop"])
async def test_rank_that_hangs_is_lost_when_the_watchdog_says_so(folder: Path, what: str) -> None:
    host, executor, team = start(a_plan(folder, 2), watchdog_s=1.0, fault=f"1:3:{what}")
    try:
        error = str(await run_until_lost(host, executor, 8))
        assert "step 3 (decode, 1 rows, 1 tokens)" in error and "rank 1" in error
        assert "--watchdog-timeout is 1 s" in error or "has not been heard of" in error
    finally:
        await asyncio.wait_for(executor.close(), 10)
    assert executor.is_stuck
    assert all(process.returncode is not None for process in team.processes)


async def test_ranks_that_disagree_are_found_in_debug_mode(folder: Path) -> None:
    host, executor, _ = start(a_plan(folder, 2, is_debug=True), fault="1:4:wrong")
    try:
        steps = [host.step([(0, [1, 2, 3, 4])], fresh=True)]
        for step in steps + [host.step([(0, None)]) for _ in range(3)]:
            await executor.launch(step)
        async with asyncio.timeout(5):
            while executor.is_alive():
                await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="step 4: plan or tokens differ"):
            executor.launch(host.step([(0, None)]))
    finally:
        await asyncio.wait_for(executor.close(), 10)


@pytest.mark.parametrize("rank", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_rank_that_dies_while_nothing_runs_is_noticed(folder: Path, rank: int) -> None:
    host, executor, team = start(a_plan(folder, 3), buckets=Buckets((1,), ()))
    await host.tokens([host.step([(0, [1, 2])], fresh=True)])
    os.kill(team.processes[rank - 1].pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        while executor.is_alive():
            await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match=f"rank {rank} was killed by SIGKILL .while idle"):
        executor.launch(host.step([(0, None)]))
    capture = executor._local.capture
    capture.request(GraphKey("decode", 1, 1))
    assert capture.is_settled.is_set()  # else whoever prepares would wait forever
    await asyncio.wait_for(executor.close(), 10)


def test_ranks_that_cannot_start_give_one_reason(folder: Path) -> None:
    with pytest.raises(RankError, match="^ranks 1, 2: cannot start: no such weights$"):
        start(a_plan(folder, 3), fault="all:load:no such weights")
    assert not children()


@pytest.mark.parametrize("place", ["load", "allocate"])
def test_rank_that_hangs_while_it_starts_is_given_up_once_it_is_silent(
    folder: Path, place: str
) -> None:
    with pytest.raises(RankError, match=r"^rank 1 has not been heard of for \d+\.\d s$"):
        start(a_plan(folder, 2, timeout_s=2.0), fault=f"1:stops:{place}")
    assert not children()


def children() -> list[psutil.Process]:
    own = psutil.Process().children(recursive=True)
    return [each for each in own if "rank_host.py" in " ".join(each.cmdline())]


def test_watchdog_knows_what_a_step_of_its_size_may_take(folder: Path) -> None:
    now = [0.0]
    watchdog = Watchdog(5.0, clock=lambda: now[0])
    single = rank_host.alone(folder)
    short, long = single.step([(0, [1] * 10)]), single.step([(1, [1] * 400)])
    watchdog.launched(short)
    now[0] = 1.0
    watchdog.finished(short.seq)  # 0.1 s per token
    watchdog.launched(long)
    now[0] = 1.0 + 10 * 40.0 + 4.9
    assert watchdog.overdue() is None
    now[0] += 0.2
    assert "prefill, 1 rows, 400 tokens" in (watchdog.overdue() or "")
    watchdog.finished(long.seq)
    held = single.step([(0, None)], constrained=True)
    watchdog.launched(held)
    now[0] += 1e6
    assert watchdog.overdue() is None  # the host takes its time with the mask
    watchdog.sampling(held.seq)
    now[0] += 1e6
    assert watchdog.overdue() is not None
    asyncio.run(single.ranked.close())


@dataclass
class Server:
    process: asyncio.subprocess.Process
    url: str
    ranks: list[int]  # process ids
    log: Path


@asynccontextmanager
async def a_server(
    folder: Path, log: Path, size: int, watchdog_s: float, fault: str
) -> AsyncIterator[Server]:
    support = Path(rank_host.__file__).parent
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(support / "rank_server.py"), str(folder), str(size),
            str(watchdog_s), stderr=stderr, stdout=stderr,
            env={**os.environ, rank_host.FAULT: fault},
        )  # fmt: skip
    ranks: list[int] = []
    try:
        async with asyncio.timeout(60):
            while (found := re.search(r"http://127.0.0.1:(\d+)", log.read_text())) is None:
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        (listed,) = re.findall(r"ranks at (\[.*\])", log.read_text())
        ranks = json.loads(listed)
        yield Server(process, f"http://127.0.0.1:{found[1]}", ranks, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for pid in ranks:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


async def all_gone(pids: list[int]) -> None:
    while any(psutil.pid_exists(pid) for pid in pids):
        await asyncio.sleep(0.02)


async def stream(session: aiohttp.ClientSession, server: Server) -> str:
    body = {
        "input_ids": [1, 2, 3], "stream": True,
        "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
    }  # fmt: skip
    async with session.post(server.url + "/generate", json=body) as response:
        return (await response.read()).decode()


@pytest.mark.server
@pytest.mark.parametrize(
    ("fault", "watchdog_s", "says"),
    [
        ("1:1:kill", 60.0, "rank 1 was killed by SIGKILL"),
        pytest.param("2:30:kill", 60.0, "rank 2 was killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param("1:30:raise", 60.0, "out of luck", marks=pytest.mark.slow),
        ("2:30:stop", 1.0, "rank 2 has"),
    ],
)
async def test_server_ends_its_streams_and_itself_when_a_rank_is_lost(
    folder: Path, tmp_path: Path, fault: str, watchdog_s: float, says: str
) -> None:
    before = set(SHM.iterdir()) if SHM.exists() else set()
    log = tmp_path / "log"
    async with a_server(folder, log, 3, watchdog_s, fault) as server:
        async with aiohttp.ClientSession() as session, asyncio.timeout(15):
            ends = await asyncio.gather(*(stream(session, server) for _ in range(2)))
        for end in ends:  # said in the stream, which then ends as any other
            assert says in end and end.rstrip().endswith("data: [DONE]")
        async with asyncio.timeout(10):
            assert await server.process.wait() == 1, log.read_text()
            await all_gone(server.ranks)
    assert log.read_text().count("CRITICAL") == 1
    if SHM.exists():
        assert set(SHM.iterdir()) <= before


@pytest.mark.server
async def test_idle_server_says_503_and_leaves_when_a_rank_is_killed(
    folder: Path, tmp_path: Path
) -> None:
    async with a_server(folder, tmp_path / "log", 2, 60.0, "") as server:
        async with aiohttp.ClientSession() as session:
            os.kill(server.ranks[0], signal.SIGKILL)
            async with asyncio.timeout(2):
                while await is_healthy(session, server):
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            assert await server.process.wait() == 1
            await all_gone(server.ranks)


async def is_healthy(session: aiohttp.ClientSession, server: Server) -> bool:
    """A server that has left is not healthy either."""
    try:
        async with session.get(server.url + "/health") as response:
            return response.status != 503
    except aiohttp.ClientConnectionError:
        return False


@pytest.mark.server
@pytest.mark.parametrize("is_busy", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_ranks_leave_when_rank_0_is_killed(
    folder: Path, tmp_path: Path, is_busy: bool
) -> None:
    async with a_server(folder, tmp_path / "log", 3, 60.0, "") as server:
        async with aiohttp.ClientSession() as session:
            running = asyncio.create_task(stream(session, server)) if is_busy else None
            await asyncio.sleep(0.05 * is_busy)
            server.process.kill()
            async with asyncio.timeout(10):
                await all_gone(server.ranks)
            if running is not None:
                with pytest.raises(aiohttp.ClientError):
                    await running


@pytest.mark.server
@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
async def test_signal_to_the_whole_group_ends_an_engine_in_order(
    folder: Path, tmp_path: Path, signal_number: int
) -> None:
    async with a_server(folder, tmp_path / "log", 2, 60.0, "") as server:
        for pid in (*server.ranks, server.process.pid):
            os.kill(pid, signal_number)
        async with asyncio.timeout(10):
            assert await server.process.wait() == 0, server.log.read_text()
            await all_gone(server.ranks)
    assert "lost" not in server.log.read_text()
