"""Factories for engines that run on a fake executor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fake_engine import capacity, make_parts

from treadle.engine import Engine
from treadle.graphs.fake import FakeExecutor

EngineFactory = Callable[..., Engine]


@pytest.fixture
async def make_engine() -> AsyncIterator[EngineFactory]:
    """make_engine(executor=None, **flags); closes and checks every engine it made."""
    made: list[Engine] = []

    def make(executor: FakeExecutor | None = None, **flags: Any) -> Engine:
        engine = Engine(make_parts(executor or FakeExecutor(capacity()), **flags))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        await engine.shutdown()
        engine.scheduler.check_integrity()
