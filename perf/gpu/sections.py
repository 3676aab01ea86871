"""What the GPU check consists of: sections, the units of each, and the rows that they become.

Knows names and limits; never torch, so that the supervising process stays light.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Value = float | int | str | bool
Values = dict[str, Value]


class Unmeasured(RuntimeError):
    """This machine cannot measure it; the text says why."""


class Failed(RuntimeError):
    """It was measured, and it is wrong."""

    def __init__(self, reason: str, values: Values) -> None:
        super().__init__(reason)
        self.values = values


@dataclass(frozen=True, slots=True)
class Unit:
    """What becomes one row."""

    name: str
    measure: Callable[[], Values]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where sections run, and at which size."""

    device: str = "cuda"
    is_tiny: bool = False  # sizes that a CPU can do in seconds


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    name: str
    values: Values = field(default_factory=dict)
    seconds: float = 0.0
    problem: str | None = None  # why it failed or could not be measured
    is_failure: bool = False  # False: merely not measured

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Section:
    """`module` has `units(setting)`; it is imported in the section's own process only."""

    name: str
    what: str
    limit_s: float
    module: str

    def units(self, setting: Setting) -> Sequence[Unit]:
        found: Sequence[Unit] = importlib.import_module(self.module).units(setting)
        return found


def _section(name: str, what: str, limit_s: float, module: str) -> Section:
    return Section(name, what, limit_s, f"treadle.perf.gpu.{module}")


# Limits add up to less than eight minutes; they are for a GPU like the H200.
SECTIONS = (
    _section("env", "versions, GPU, memory, driver, clocks", 20, "environment"),
    _section("replay", "graph replay against eager, bit for bit", 80, "replay"),
    _section("memory", "release and resume with the memory saver", 25, "memory"),
    _section("copies", "page copies between device and host", 25, "copies"),
    _section("kernels", "Triton kernels against reference and roofline", 75, "kernels"),
    _section("models", "decode and prefill of two model shapes, eager and graphs", 135, "models"),
    _section("ranks", "tensor parallelism over all GPUs beside one", 40, "ranks"),
    _section("tests", "pytest -m gpu", 80, "suite"),
)
