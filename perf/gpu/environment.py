"""What the numbers were measured with: packages, GPU, driver, clocks.

Knows nothing of the engine but its packages' names.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Sequence

import torch

from treadle.perf.gpu.sections import Setting, Unit, Unmeasured, Values

_PACKAGES = (
    "torch", "triton", "numpy", "cupy-cuda13x", "cuda-bindings", "transformers", "tokenizers",
    "safetensors", "psutil", "pytest", "pytest-asyncio", "gguf", "orjson", "openai",
)  # fmt: skip
_QUERY = (
    "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem",
    "temperature.gpu", "power.draw", "power.limit",
)  # fmt: skip


def units(setting: Setting) -> Sequence[Unit]:
    return [
        Unit("packages", packages),
        Unit("gpu", lambda: gpu(setting)),
        Unit("driver and clocks", lambda: clocks(setting)),
    ]


def packages() -> Values:
    found: Values = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    missing = []
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return found | {"missing": ", ".join(missing) or "none"}


def gpu(setting: Setting) -> Values:
    if setting.device == "cpu":
        raise Unmeasured("on the CPU")
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory_gb": total / 1e9,
        "free_gb": free / 1e9,
        "l2_mb": found.L2_cache_size / 1e6,
    }


def clocks(setting: Setting) -> Values:
    if setting.device == "cpu":
        raise Unmeasured("on the CPU")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise Unmeasured("nvidia-smi is not there")
    done = subprocess.run(
        [tool, "-i", "0", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    if done.returncode:
        raise Unmeasured(f"nvidia-smi: {(done.stdout + done.stderr).strip()[:200]}")
    return dict(zip(_QUERY, (each.strip() for each in done.stdout.split(",")), strict=True))
