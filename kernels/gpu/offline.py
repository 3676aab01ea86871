"""Compiles kernels for GPUs that are not there, and says what they use of one.

Knows no kernel: it records the launches that the callers make, so what is compiled is what would
run. Needs Triton's compiler, not its interpreter.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit

from treadle.kernels.gpu.device import Gpu, assume

TARGETS: Final = {  # A100, H100 and H200, B200
    "sm_80": Gpu(80, 108),
    "sm_90": Gpu(90, 132),
    "sm_100": Gpu(100, 148),
}
_BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes on one target."""

    registers: int  # per thread
    stack: int  # bytes per thread
    spills: int  # store and load instructions that go to the stack
    shared: int  # bytes per block


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: Any  # JITFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self, target: str) -> Resources:
        """Raises: whatever Triton's compiler raises."""
        gpu = GPUTarget("cuda", TARGETS[target].capability, 32)
        backend = make_backend(gpu)
        bind = jit.create_function_from_signature(
            self.kernel.signature, self.kernel.params, backend
        )
        kwargs = {**self.kwargs, "debug": False, "instrumentation_mode": ""}
        bound, specialization, options = bind(*self.args, **kwargs)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=gpu, options=options.__dict__)
        return _resources(compiled.asm["cubin"], compiled.metadata.shared)


def record(call: Callable[[], object], target: str) -> list[Launch]:
    """The launches that `call` makes on a target; none of them runs."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, args, kwargs))

    with _replaced(run), assume(TARGETS[target]):
        call()
    return launches


@contextlib.contextmanager
def _replaced(run: Callable[..., None]) -> Iterator[None]:
    original = jit.JITFunction.run
    jit.JITFunction.run = run
    try:
        yield
    finally:
        jit.JITFunction.run = original


def _resources(cubin: bytes, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return Resources(found["REG"], found["STACK"], spills, max(shared, found["SHARED"]))


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(_BINARIES / tool), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout
