"""Loading the compiled kernels: every build agrees, and its absence is no failure."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from treadle.kernels import host, paged_attention
from treadle.kernels.paged_attention import AttentionMeta

BUILDS = dict(host._BUILDS)


def library_path(build: str) -> Path:
    return Path(host.__file__).with_name(build + sysconfig.get_config_var("EXT_SUFFIX"))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_build_agrees_with_torch(
    monkeypatch: pytest.MonkeyPatch, build: str, dtype: torch.dtype
) -> None:
    if not library_path(build).exists() or not BUILDS[build] <= host._cpu_flags():
        pytest.skip(f"{build} is not built, or not for this CPU")
    monkeypatch.setattr(host, "LIBRARY", ctypes.CDLL(str(library_path(build))))
    compiled = paged_attention._paged_attention
    assert compiled is not None
    arguments = [host.INT, *[host.POINTER] * 7, *[host.SIZE] * 8, host.FLOAT]
    function = host.function("treadle_paged_attention", arguments)
    monkeypatch.setattr(paged_attention, "_paged_attention", function)
    q = torch.randn(22, 6, 80).to(dtype)
    k_cache, v_cache = torch.randn(2, 512, 2, 80).to(dtype)
    meta = AttentionMeta(
        torch.tensor([0, 1, 21, 22]).int(),
        torch.tensor([128, 50, 7]).int(),
        torch.randperm(128).view(4, 32)[:3].int(),
        4,
        20,
        128,
    )
    for window in (None, 9):
        out = paged_attention.paged_attention(q, k_cache, v_cache, meta, 0.1, window)
        want = paged_attention.paged_attention_torch(q, k_cache, v_cache, meta, 0.1, window)
        tolerance = 1e-5 if dtype is torch.float32 else 2**-7
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


def test_load_skips_builds_for_other_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded.append(Path(path).name))
    for flags in (host._V4, host._V3, host._V4 - {"fma"}):
        monkeypatch.setattr(host, "_cpu_flags", lambda flags=flags: flags)
        host._load()
    assert [name.split(".")[0] for name in loaded] == ["_host_v4", "_host_v3", "_host"]


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
    assert loaded == str(switch == "1" and host.LIBRARY is not None)
    assert runtimes == "1"
