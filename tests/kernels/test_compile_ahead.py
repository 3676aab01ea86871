"""What serving launches is known beforehand, and compiled in other threads than the caller's."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import jit  # noqa: E402

from treadle.kernels.gpu import compile_ahead, offline  # noqa: E402
from treadle.kernels.gpu.device import Gpu, assume, gpu_of  # noqa: E402

SHAPE = """
import json, sys
import torch
from treadle.kernels.gpu import compile_ahead, offline
shape = compile_ahead.ModelShape(
    hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32, rotary_dim=16, interleaved=False,
    qk_norm=True, intermediate_size=80, is_gelu=False, vocab_size=5003, num_token_ids=5000,
    dtype=torch.bfloat16, kv_dtype=torch.bfloat16, page_size=16, windows=frozenset([None, 100]),
    max_rows=300, max_tokens=2000,
)
"""

OTHER_SIZES = """
gpu = offline.TARGETS[sys.argv[1]]
known = {launch.variant(gpu) for launch in compile_ahead.variants(shape, gpu)}
met = set()
for rows, tokens, q_len in json.loads(sys.argv[2]):
    for call in (
        lambda: compile_ahead._layer(shape, tokens),
        lambda: compile_ahead._attend(shape, tokens, rows, q_len),
        lambda: compile_ahead._attend(shape, rows, rows, 1),
        lambda: compile_ahead._sample(shape, rows),
    ):
        met |= {launch.variant(gpu) for launch in offline.record(call, gpu)}
print(json.dumps([len(known), sorted(known - met), sorted(met - known)]))
"""

NO_DEVICE = """
import contextlib, dataclasses, threading
import triton
from triton.backends.compiler import GPUTarget
from treadle.kernels.gpu.device import assume

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
torch.cuda.device = lambda device: contextlib.nullcontext()
loaded, threads = [], set()
compile_ahead._load = lambda device, kernel: loaded.append(kernel.result().asm["cubin"])
compile = triton.compiler.compile

def noted(*args, **kwargs):
    threads.add(threading.current_thread())
    return compile(*args, **kwargs)

triton.compiler.compile = noted
shape = dataclasses.replace(shape, triton_attention=False, triton_sampling=False)
with assume(offline.TARGETS["sm_90"]):
    done = compile_ahead.compile_ahead(shape, torch.device("cuda", 0), workers=2)
    kernels = {launch.kernel for launch in compile_ahead.variants(shape, offline.TARGETS["sm_90"])}
cached = [k for kernel in kernels for k in kernel.device_caches[0][0].values()]
print(json.dumps([
    done.num_kernels, len(loaded), threading.current_thread() in threads, len(threads),
    [type(kernel).__name__ for kernel in cached], all(loaded), done.seconds > 0,
]))
"""


def run(tmp_path: Path, *scripts: str, arguments: tuple[str, ...] = ()) -> Any:
    """Kernels are compiled where they are not interpreted: in another process."""
    done = subprocess.run(
        [sys.executable, "-c", "".join(scripts), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", offline.TARGETS)
def test_steps_of_any_size_need_no_other_kernels(tmp_path: Path, target: str) -> None:
    sizes = [
        (rows := random.randint(1, 300), tokens := random.randint(rows + 1, 2000),
         random.randint(2, tokens - rows + 1))
        for _ in range(60)
    ]  # fmt: skip
    sizes += [(1, 2, 2), (1, 2000, 2000), (300, 2000, 2), (300, 2000, 1701)]
    count, unused, unknown = run(
        tmp_path, SHAPE, OTHER_SIZES, arguments=(target, json.dumps(sizes))
    )
    assert not unknown
    assert not unused
    assert count < 30


def test_kernels_are_compiled_in_worker_threads(tmp_path: Path) -> None:
    count, loaded, in_caller, threads, kinds, are_all, took = run(tmp_path, SHAPE, NO_DEVICE)
    assert count == loaded == len(kinds) and count >= 6
    assert not in_caller and 1 <= threads <= 2
    assert set(kinds) == {"CompiledKernel"}
    assert are_all and took


def test_sizes_cover_both_ends() -> None:
    assert compile_ahead._sizes(1) == [1]
    assert compile_ahead._sizes(8) == [1, 2, 4, 8]
    assert compile_ahead._sizes(300) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]


def test_recording_lets_other_threads_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    monkeypatch.setattr(
        jit.JITFunction, "run", lambda self, *args, grid, warmup: launched.append((self, args))
    )
    kernel: Any = object()

    def launch() -> None:
        jit.JITFunction.run(kernel, 5, grid=(1,), warmup=False)

    def both() -> None:
        other = threading.Thread(target=launch)
        other.start()
        other.join()
        jit.JITFunction.run(kernel, 7, grid=(2,), warmup=False)

    (recorded,) = offline.record(both, Gpu(90, 132))
    assert recorded.args == (7,) and recorded.grid == (2,)
    assert launched == [(kernel, (5,))]
    launch()
    assert len(launched) == 2


def test_an_assumed_gpu_is_the_threads_own() -> None:
    seen: list[Gpu] = []
    device, small = torch.device("cpu"), Gpu(80, 7)
    with assume(small):
        other = threading.Thread(target=lambda: seen.append(gpu_of(device)))
        other.start()
        other.join()
        with assume(Gpu(100, 3)):
            assert gpu_of(device) == Gpu(100, 3)
        assert gpu_of(device) == small
    assert seen == [gpu_of(device)] and seen != [small]
