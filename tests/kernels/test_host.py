"""Loading the compiled kernels: every build agrees, and its absence is no failure."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from treadle.kernels import activation, host, linear, paged_attention, reference, rmsnorm
from treadle.kernels.paged_attention import AttentionMeta

BUILDS = dict(host._BUILDS)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREADLE_HOST_KERNELS", raising=False)


def library_path(build: str) -> Path:
    return Path(host.__file__).with_name(build + sysconfig.get_config_var("EXT_SUFFIX"))


@pytest.fixture(params=BUILDS)
def use_build(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModuleType, str], None]:
    """Makes a module's kernel call one of the builds."""
    build: str = request.param
    if (
        host.LIBRARY is None
        or not library_path(build).exists()
        or not BUILDS[build] <= host._cpu_flags()
    ):
        pytest.skip(f"{build} is not built, not for this CPU, or switched off")
    library = ctypes.CDLL(str(library_path(build)))

    def use(module: ModuleType, name: str) -> None:
        argtypes = getattr(module, f"_{name}").argtypes
        function = host.Function(library, f"treadle_{name}", argtypes)
        monkeypatch.setattr(module, f"_{name}", function)

    return use


DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)]
)


@DTYPES
def test_every_build_multiplies(
    use_build: Callable[[ModuleType, str], None], dtype: torch.dtype, tolerance: float
) -> None:
    use_build(linear, "linear")
    x, weight, bias = (torch.randn(n).to(dtype) for n in [(23, 96), (48, 96), (48,)])
    want = reference.linear(x, weight, bias).to(dtype)
    torch.testing.assert_close(linear.linear(x, weight, bias), want, rtol=tolerance, atol=1e-5)


@DTYPES
def test_every_build_works_row_by_row(
    use_build: Callable[[ModuleType, str], None], dtype: torch.dtype, tolerance: float
) -> None:
    use_build(rmsnorm, "rms_norm")
    use_build(activation, "silu_and_mul")
    x, weight = torch.randn(5, 2 * 77).to(dtype), torch.randn(2 * 77).to(dtype)
    want = rmsnorm.rms_norm_torch(x, weight, 1e-5)
    torch.testing.assert_close(rmsnorm.rms_norm(x, weight, 1e-5), want, rtol=tolerance, atol=1e-5)
    want = activation.silu_and_mul_torch(x)
    torch.testing.assert_close(activation.silu_and_mul(x), want, rtol=tolerance, atol=1e-5)


@DTYPES
def test_every_build_attends(
    use_build: Callable[[ModuleType, str], None], dtype: torch.dtype, tolerance: float
) -> None:
    use_build(paged_attention, "paged_attention")
    q = torch.randn(22, 6, 80).to(dtype)
    k_cache, v_cache = torch.randn(2, 512, 2, 80).to(dtype)
    meta = AttentionMeta(
        torch.tensor([0, 1, 21, 22]).int(),
        torch.tensor([128, 50, 7]).int(),
        torch.tensor([2, 0, 1]),
        torch.randperm(128).view(4, 32)[:3].int(),
        4,
        20,
        128,
    )
    for window in (None, 9):
        out = paged_attention.paged_attention(q, k_cache, v_cache, meta, 0.1, window)
        want = paged_attention.paged_attention_torch(q, k_cache, v_cache, meta, 0.1, window)
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


def test_load_skips_builds_for_other_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded.append(Path(path).name))
    for flags in (host._V4 | {"avx512_bf16"}, host._V4, host._V3, host._V4 - {"fma"}):
        monkeypatch.setattr(host, "_cpu_flags", lambda flags=flags: flags)
        host._load()
    assert [name.split(".")[0] for name in loaded] == list(BUILDS)


def test_load_without_a_library_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with caplog.at_level(logging.WARNING):
        assert host._load() is None
    assert len(caplog.records) == 1 and "torch" in caplog.text


def test_load_survives_a_library_that_does_not_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str) -> None:
        raise OSError("undefined symbol: GOMP_parallel")

    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert host._load() is None
    assert "GOMP_parallel" in caplog.text


SERVES_WITH_ONE_RUNTIME = """
import torch
from treadle.kernels import host, rmsnorm
x, weight = torch.randn(4096, 64), torch.randn(64)
torch.testing.assert_close(
    rmsnorm.rms_norm(x, weight, 1e-5), rmsnorm.rms_norm_torch(x, weight, 1e-5)
)
paths = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
runtimes = [p for p in paths if "libgomp" in p or "libiomp" in p or "libomp" in p]
print(host.LIBRARY is not None, len(runtimes))
"""


@pytest.mark.parametrize("switch", ["0", "1"])
def test_switch_and_a_single_openmp_runtime(switch: str) -> None:
    environment = {**os.environ, "TREADLE_HOST_KERNELS": switch}
    run = subprocess.run(
        [sys.executable, "-c", SERVES_WITH_ONE_RUNTIME],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded, runtimes = run.stdout.split()
    assert loaded == str(switch == "1" and host._load() is not None)
    assert runtimes == "1"
