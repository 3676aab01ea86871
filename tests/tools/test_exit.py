"""Programs that end without shutting their engine down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from treadle.engine import Engine

async def main():
    engine = await Engine.create(model_path=sys.argv[1])
    params = {"max_new_tokens": 4000, "ignore_eos": True}
    running = asyncio.create_task(engine.generate("a", params))
    await asyncio.sleep(0.7)

asyncio.run(main())
"""


@pytest.mark.model
@pytest.mark.slow
def test_program_that_ends_while_a_request_runs_exits_cleanly(smollm2_gguf: Path) -> None:
    """Half of the runs met an interpreter that was gone, and died by SIGABRT."""
    for _ in range(6):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(smollm2_gguf)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2000:]
