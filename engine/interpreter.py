"""The interpreter's settings that a step's many short calls depend on.

Knows no engine. Where Treadle owns the process it sets them; embedded it only says what it found.
"""

from __future__ import annotations

import logging
import sys

SWITCH_INTERVAL_S = 0.0005  # each of a step's torch calls may wait for the GIL this long

logger = logging.getLogger("treadle")


def own_interpreter() -> None:
    """For a process that is Treadle's alone."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def report_interpreter() -> None:
    """For a process that is somebody else's: a long switch interval is worth a word."""
    interval = sys.getswitchinterval()
    if interval > SWITCH_INTERVAL_S * 1.5:
        logger.info(
            "The switch interval is %.1f ms: where other Python threads are busy, steps are faster "
            "after sys.setswitchinterval(%g)",
            interval * 1e3, SWITCH_INTERVAL_S,
        )  # fmt: skip
