"""Where time goes: a clock by hand, so that every figure is known beforehand."""

from __future__ import annotations

import asyncio
import random

import pytest

from treadle.perf import stopwatch
from treadle.perf.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = random.uniform(0, 1e6)

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: int) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    return clock


def test_inner_part_stops_the_outer_and_all_add_up(clock: Clock) -> None:
    outer, inner, rest = (random.randrange(1, 100) for _ in range(3))
    watch = Stopwatch("rest")

    class Owner:
        def work(self, seconds: int) -> int:
            clock.spend(seconds)
            return seconds

    owner = Owner()
    watch.attach("inner", owner, "work")

    def around() -> int:
        clock.spend(outer)
        found = owner.work(inner)
        clock.spend(outer)
        return found

    started = clock.now
    assert watch.wrap("outer", around)() == inner
    clock.spend(rest)
    parts = watch.read()
    assert parts == pytest.approx({"outer": 2 * outer, "inner": inner, "rest": rest})
    assert sum(parts.values()) == pytest.approx(watch.elapsed)
    assert watch.elapsed == pytest.approx(clock.now - started)


def test_part_ends_with_an_exception(clock: Clock) -> None:
    watch = Stopwatch("rest")

    def fail() -> None:
        clock.spend(3)
        raise RuntimeError("as it should")

    with pytest.raises(RuntimeError):
        watch.wrap("part", fail)()
    clock.spend(5)
    assert watch.read() == pytest.approx({"part": 3, "rest": 5})


async def test_coroutine_keeps_its_part_while_it_waits(clock: Clock) -> None:
    watch = Stopwatch("rest")

    async def wait() -> None:
        clock.spend(2)
        await asyncio.sleep(0)
        clock.spend(1)

    asyncio.get_running_loop().call_soon(clock.spend, 7)
    await watch.wrap_async("part", wait)()
    clock.spend(4)
    assert watch.read() == pytest.approx({"part": 10, "rest": 4})


def test_restart_forgets(clock: Clock) -> None:
    watch = Stopwatch("rest")
    clock.spend(9)
    watch.restart()
    clock.spend(1)
    assert watch.read() == pytest.approx({"rest": 1})
    assert watch.elapsed == pytest.approx(1)
