"""Rows as they come: into a JSON file, and as a table on stdout.

Knows rows only. The file is replaced whole after every row, so that it is complete at any time.
"""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

from treadle.perf.gpu.sections import Row, Value

WIDTH = 100
_SECTION, _NAME = 8, 34


class Results:
    """The rows of this run and, when it resumes one, of those that stand."""

    def __init__(self, path: Path | None, resumed: Path | None = None) -> None:
        """resumed: a file of an earlier run; its rows without a problem are kept.

        Raises: ValueError for a file that no run has written.
        """
        self._path = path
        self.rows = [] if resumed is None else [row for row in _read(resumed) if not row.problem]

    def done(self, section: str) -> list[str]:
        return [row.name for row in self.rows if row.section == section]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._path is None:
            return
        document = {"rows": [row.to_json() for row in self.rows]}
        unfinished = self._path.with_name(f"{self._path.name}.part")
        unfinished.write_text(json.dumps(document, indent=1))
        os.replace(unfinished, self._path)

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.is_failure]

    @property
    def unmeasured(self) -> list[Row]:
        return [row for row in self.rows if row.problem and not row.is_failure]


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    try:
        return [Row(**row) for row in json.loads(path.read_text())["rows"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no rows of this check: {error}") from error


def header() -> str:
    return f"{'section':<{_SECTION}} {'row':<{_NAME}} {'ok':<4} result\n{'-' * WIDTH}"


def line(row: Row) -> str:
    """One row of the table, continued on indented lines where it is long."""
    state = "FAIL" if row.is_failure else "-" if row.problem else "ok"
    words = [row.problem] if row.problem else []
    words += [f"{name}={_shown(value)}" for name, value in row.values.items()]
    begin = f"{row.section:<{_SECTION}} {row.name:<{_NAME}} {state:<4} "
    return textwrap.fill(
        "  ".join(words), WIDTH, initial_indent=begin, subsequent_indent=" " * (_SECTION + 6),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _shown(value: Value) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
