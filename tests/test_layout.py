"""The shape of the repository: packaging, budgets, layers."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "graphs", "kernels", "http", "tools", "perf")
MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_METHODS, MAX_PARAMETERS = 400, 60, 250, 12, 8
TOP_LEVEL = {
    "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "constraints.txt", "LICENSE",
    ".ci", ".gitignore", "docs", "tests", *PACKAGES,
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def nodes(kind: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def length(node: ast.AST) -> int:
    assert isinstance(node, (ast.stmt,))
    return (node.end_lineno or 0) - node.lineno + 1


def test_top_level_holds_what_the_architecture_names() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} <= TOP_LEVEL


def test_packages_are_all_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"treadle." + ".".join(path.parent.relative_to(ROOT).parts) for path in sources()}
    assert set(declared["packages"]) == found
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def test_namespace_folders_have_no_init() -> None:
    assert (ROOT / "engine/__init__.py").exists()
    for package in set(PACKAGES) - {"engine"}:
        assert not (ROOT / package / "__init__.py").exists(), package
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_files_stay_within_budget() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources()
        if (lines := len(path.read_text().splitlines())) > MAX_FILE
    }
    assert not long


def test_functions_stay_within_budget() -> None:
    long = {where: length(n) for where, n in nodes((ast.FunctionDef, ast.AsyncFunctionDef))
            if length(n) > MAX_FUNCTION}  # fmt: skip
    assert not long


def test_classes_stay_within_budget() -> None:
    over = {}
    for where, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        public = [
            child.name
            for child in node.body
            if isinstance(child, Function)
            and not child.name.startswith("_")
            and not any(
                isinstance(d, ast.Name) and d.id == "property" for d in child.decorator_list
            )
        ]
        if length(node) > MAX_CLASS or len(public) > MAX_METHODS or node.name.endswith("Mixin"):
            over[where] = (length(node), len(public))
    assert not over


def test_parameters_stay_within_budget() -> None:
    over = {}
    for where, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
        assert isinstance(node, Function)
        args = node.args
        names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        is_kernel = where.startswith("kernels/")
        if count > MAX_PARAMETERS and not is_kernel:
            over[where] = count
    assert not over


def test_serving_on_the_fake_executor_loads_no_torch() -> None:
    code = """
import asyncio, sys
sys.path.insert(0, "tests/support")
import fake_engine
import treadle.http.app
from treadle.engine import Engine

async def main():
    engine = Engine(fake_engine.make_parts(fake_engine.FakeExecutor(fake_engine.capacity())))
    answer = await engine.generate("hello", {"max_new_tokens": 4, "ignore_eos": True})
    assert answer.completion_tokens == 4
    await engine.shutdown()

asyncio.run(main())
heavy = {"torch", "triton", "cupy", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
