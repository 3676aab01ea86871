"""Flags with values that argparse alone would let through."""

from __future__ import annotations

import pytest

from treadle.tools import cli


@pytest.mark.parametrize("text", ["infk", "-infM", "1e400k"])
def test_integers_with_a_suffix_are_finite(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["serve", f"--max-total-tokens={text}", "--explain"])
    assert raised.value.code == 2
    assert "--max-total-tokens" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1,,2", "1;2", "many"])
def test_lists_hold_integers(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["serve", f"--cuda-graph-bs={text}", "--explain"])
    assert raised.value.code == 2
    assert "--cuda-graph-bs" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "-5"])
def test_shutdown_timeout_is_a_time(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is none ends every answer at once."""
    try:
        code: object = cli.main(["serve", "/no/model", f"--shutdown-timeout={text}", "--explain"])
    except SystemExit as raised:
        code = raised.code
    assert code and "--shutdown-timeout" in capsys.readouterr().err
