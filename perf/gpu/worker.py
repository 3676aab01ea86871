"""One section in a process of its own: says what it will do, what it does, and what came of it.

Knows units only. Speaks JSON lines on what was stdout; whatever else is printed goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

from treadle.perf.gpu.sections import Failed, Row, Section, Setting, Unit, Unmeasured

DEVICE_LOST = 3  # exit status: nothing more can be measured in this process

Say = Callable[[dict[str, Any]], None]


def work(section: Section, setting: Setting, done: Collection[str], say: Say) -> int:
    """Measures every unit that is not done; returns the exit status."""
    units = [unit for unit in section.units(setting) if unit.name not in done]
    say({"plan": [unit.name for unit in units]})
    for unit in units:
        say({"begin": unit.name})
        row = measure(section.name, unit)
        say({"row": row.to_json()})
        if row.problem and setting.device != "cpu" and _is_lost():
            return DEVICE_LOST
    return 0


def measure(section: str, unit: Unit) -> Row:
    """The unit's row, whatever happens in it."""
    started = time.perf_counter()

    def row(values: Any, problem: str | None = None, is_failure: bool = False) -> Row:
        seconds = round(time.perf_counter() - started, 3)
        return Row(section, unit.name, values, seconds, problem, is_failure)

    try:
        return row(unit.measure())
    except Unmeasured as error:
        return row({}, str(error))
    except Failed as error:
        return row(error.values, str(error), is_failure=True)
    except Exception as error:
        traceback.print_exc()
        lines = f"{type(error).__name__}: {error}".splitlines()
        return row({}, " ".join(lines)[:400], is_failure=True)


def _is_lost() -> bool:
    """An error that has spoilt the context comes back from every later call."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main(section: Section, setting: Setting) -> int:
    """Reads the names of done rows from stdin."""
    done: Sequence[str] = json.loads(sys.stdin.read() or "[]")
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)

        def say(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=lines, flush=True)

        return work(section, setting, done, say)
