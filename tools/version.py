"""The version of this Treadle, installed or run from its source folder."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def treadle_version() -> str:
    """As the package's metadata says, or pyproject.toml where it is not installed."""
    try:
        return version("treadle")
    except PackageNotFoundError:
        pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
        found: str = tomllib.loads(pyproject.read_text())["project"]["version"]
        return found
