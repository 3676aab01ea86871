"""The report on Triton's kernels: compiled without a GPU, compared with the committed table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from treadle.kernels.gpu.offline import TARGETS, Resources  # noqa: E402
from treadle.tools import kernel_report  # noqa: E402
from treadle.tools.kernel_report import BEGIN, END, Table  # noqa: E402

TABLE: Table = {
    ("decode_kernel", "D=64, one row", "sm_80"): Resources(80, 0, 0, 20736),
    ("decode_kernel", "D=64, one row", "sm_90"): Resources(72, 16, 4, 20736),
    ("norm_kernel", "D=8", "sm_90"): Resources(16, 0, 0, 0),
}


def test_table_survives_its_document() -> None:
    document = f"words | and | bars\n{BEGIN}\n{kernel_report.render(TABLE)}\n{END}\nmore"
    assert kernel_report.parse(document) == TABLE


def test_more_instructions_on_the_stack_are_a_new_spill() -> None:
    key = ("decode_kernel", "D=64, one row", "sm_90")
    assert kernel_report.new_spills(TABLE, TABLE) == []
    assert kernel_report.new_spills(TABLE, {key: Resources(255, 0, 3, 0)}) == []
    (line,) = kernel_report.new_spills(TABLE, {key: Resources(72, 24, 5, 20736)})
    assert "decode_kernel" in line and "sm_90" in line and "4 -> 5" in line
    assert len(kernel_report.new_spills({}, TABLE)) == 1


def test_committed_table_has_every_case_and_target() -> None:
    table = kernel_report.parse(kernel_report.DOCUMENT.read_text())
    assert {target for _, _, target in table} == set(TARGETS)
    named = {case.removesuffix(", first pass") for _, case, _ in table}
    assert named == set(kernel_report.cases())


@pytest.mark.parametrize("case", ["H=32 K=8 D=128 bfloat16, one row", "filtered"])
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path, case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "treadle.tools.kernel_report", "--only", case, "--targets", "sm_90"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = kernel_report.parse(f"{BEGIN}\n{done.stdout}\n{END}")
    kernels = {kernel for kernel, _, _ in found}
    if case == "filtered":
        assert kernels == {
            "summary_kernel", "narrow_kernel", "threshold_kernel", "draw_kernel", "pick_kernel",
        }  # fmt: skip
    else:
        assert kernels == {"decode_kernel", "combine_kernel"}
    assert all(used.registers > 0 for used in found.values())
