"""Records launches without running them, to compile them for a GPU that need not be there.

Knows no kernel: what the callers launch is recorded as it is, so what is compiled is what would
run. Needs Triton's compiler, not its interpreter.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import threading
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
_DEFAULTS: Final = {"debug": False, "instrumentation_mode": ""}
_RECORDING = threading.Lock()
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
    grid: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def variant(self, gpu: Gpu) -> tuple[str, ...]:
        """Launches of one variant share a compiled kernel."""
        bound, specialization, options = self._bind(make_backend(_target(gpu)))
        return self.name, str(specialization), str(sorted(options.items()))

    def warm(self) -> Any:
        """Compiles it for the current device: a CompiledKernel, or what becomes one."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.kwargs)

    def compile(self, target: str) -> Resources:
        """Raises: whatever Triton's compiler raises."""
        gpu = _target(TARGETS[target])
        backend = make_backend(gpu)
        bound, specialization, options = self._bind(backend)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, {**self.kwargs, **_DEFAULTS}, bound, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=gpu, options=options.__dict__)
        return _resources(compiled.asm["cubin"], compiled.metadata.shared)

    def _bind(self, backend: Any) -> tuple[Any, Any, dict[str, Any]]:
        bind = jit.create_function_from_signature(
            self.kernel.signature, self.kernel.params, backend
        )
        bound, specialization, options = bind(*self.args, **self.kwargs, **_DEFAULTS)
        return bound, specialization, options


def record(call: Callable[[], object], gpu: Gpu) -> list[Launch]:
    """The launches that `call` makes on a GPU; none of them runs. Other threads' do."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, grid, args, kwargs))

    with _replaced(run), assume(gpu):
        call()
    return launches


@contextlib.contextmanager
def _replaced(run: Callable[..., None]) -> Iterator[None]:
    thread = threading.get_ident()
    with _RECORDING:
        original = jit.JITFunction.run

        def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = run if threading.get_ident() == thread else original
            return chosen(self, *args, **kwargs)

        jit.JITFunction.run = choose
        try:
            yield
        finally:
            jit.JITFunction.run = original


def _target(gpu: Gpu) -> GPUTarget:
    return GPUTarget("cuda", gpu.capability, 32)


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
