"""The tests that need a GPU, one file after the other, each in a pytest process of its own.

Knows pytest's command line and its JUnit file. A spoilt CUDA context ends with its file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from treadle.perf.gpu.sections import Failed, Setting, Unit, Unmeasured, Values

ROOT = Path(__file__).resolve().parents[2]
_MARKS = re.compile(r"^(pytestmark = |@)pytest\.mark\.gpu\b|\bgpu_device\b", re.MULTILINE)
_NO_TESTS = 5  # pytest's exit status: nothing was collected, or all was deselected
_NEEDS = {"asyncio": "pytest_asyncio", "hypothesis": "hypothesis", "openai": "openai"}


def units(setting: Setting) -> Sequence[Unit]:
    if importlib.util.find_spec("pytest") is None:
        return [Unit("pytest", partial(_refuse, "pytest is not installed"))]
    files = gpu_files(ROOT / "tests")
    if not files:
        return [Unit("pytest", partial(_refuse, "the tests are not beside the packages"))]
    return [Unit(file.name, partial(run, file, setting)) for file in files]


def gpu_files(tests: Path) -> list[Path]:
    """Files with a test that may be marked `gpu`; the others are not even collected."""
    return [path for path in sorted(tests.rglob("test_*.py")) if _MARKS.search(path.read_text())]


def _refuse(reason: str) -> Values:
    raise Unmeasured(reason)


def run(file: Path, setting: Setting) -> Values:
    missing = [what for what, module in _NEEDS.items() if importlib.util.find_spec(module) is None]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header",
             "-c", ROOT / "pyproject.toml", "--rootdir", ROOT,
             # an installation may lack plugins that the configuration speaks of
             "-o", "addopts=--import-mode=importlib --strict-markers",
             "-W", "ignore::pytest.PytestConfigWarning", f"--junitxml={report}", str(file)],
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},  # for deterministic torch
        )  # fmt: skip
        print(done.stdout[-8000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        cases = list(_cases(report)) if report.exists() else []
    values: Values = {
        state: sum(found == state for _, found, _ in cases) for state in ("passed", "failed")
    }
    skipped = sorted({reason for _, state, reason in cases if state == "skipped"})
    if skipped:
        values["skipped"] = "; ".join(skipped)[:200]
    if missing:
        values["packages_missing"] = ", ".join(missing)
    failed = [name for name, state, _ in cases if state == "failed"]
    if failed or done.returncode not in (0, _NO_TESTS):
        names = ", ".join(failed[:6]) or done.stdout.strip().rpartition("\n")[2]
        raise Failed(f"pytest ended with {done.returncode}: {names}"[:400], values)
    if not values["passed"]:
        raise Unmeasured(f"no test ran here: {values.get('skipped', 'none is marked gpu')}")
    return values


def _cases(report: Path) -> Iterator[tuple[str, str, str]]:
    """Every test's name, its outcome, and why it was skipped."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "?")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed", ""
        elif (skip := case.find("skipped")) is not None:
            yield name, "skipped", skip.get("message", "")
        else:
            yield name, "passed", ""
