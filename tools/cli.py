"""The command line: `treadle serve`, `treadle generate`, `treadle --version`.

Knows flags and how each becomes a setting; the work is done by the module of each command.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Any

from treadle.engine.config import EngineConfig
from treadle.engine.errors import TreadleError
from treadle.engine.settings import flag, kind_of, names_of
from treadle.tools.version import treadle_version

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9}

RANK_FLAGS = ("tp_size", "tp", "tensor_parallel_size")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = [_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    if unknown:
        parser.error(_unknown(unknown[0], options.known))
    has_ranks = any((getattr(options, name, 1) or 1) > 1 for name in RANK_FLAGS)
    _log_to_stderr(options.log_level, " TP0" if has_ranks else "")
    try:
        exit_code: int = (_explain if options.explain else options.run)(options)
    except TreadleError as error:
        print(f"treadle: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the answers has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return exit_code


def engine_flags(options: argparse.Namespace) -> dict[str, object]:
    """The options that are engine settings, by flat name."""
    given = vars(options)
    names = [name for group in _groups() for each in fields(group) for name in names_of(each)]
    chosen = {name: given[name] for name in names if name in given}
    if options.place is not None:
        chosen["model_path"] = options.place
    return chosen


def seconds(text: str) -> float:
    """A time to wait."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return value


def human_int(text: str) -> int:
    """An integer, also as 8k or 1M."""
    number, suffix = (text[:-1], text[-1].lower()) if text[-1:].lower() in _SUFFIXES else (text, "")
    try:
        return int(float(number) * _SUFFIXES[suffix]) if suffix else int(number)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer such as 4096 or 4k") from None


def integers(text: str) -> list[int]:
    """One or more integers with commas between them."""
    return [human_int(number.strip()) for number in text.split(",")]


class _Extend(argparse.Action):
    """Stores the numbers of all words of an option as one list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [number for word in values for number in word])


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "int": human_int, "float": float, "str": str, "Mapping": json_object,
}  # fmt: skip


def _groups() -> list[Any]:
    config = EngineConfig()
    return [getattr(config, each.name) for each in fields(config)]


def _dashes(word: str) -> str:
    """`--max_total_tokens=5` as `--max-total-tokens=5`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown(word: str, known: Sequence[str]) -> str:
    name = word.split("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    return f"{name} is not an option{f'; did you mean {close[0]}?' if close else ''}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="treadle", description="An LLM serving engine.")
    parser.add_argument("--version", action="version", version=f"treadle {treadle_version()}")
    commands = parser.add_subparsers(dest="command", metavar="{serve,generate}")
    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    api = serve.add_argument_group("server")
    api.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    api.add_argument("--port", type=int, default=30000, help="port to listen on (30000)")
    api.add_argument("--shutdown-timeout", type=seconds, default=30.0, metavar="SECONDS",
                     help="time for running requests to finish at SIGTERM (30)")  # fmt: skip
    api.add_argument("--enable-cache-report", action="store_true",
                     help="put cached tokens into usage")  # fmt: skip
    api.add_argument("--incremental-streaming-output", action="store_true",
                     help="/generate streams deltas instead of the text so far")  # fmt: skip
    _add_engine_flags(serve, run=_serve)
    generate = commands.add_parser(
        "generate", help="answer prompts on the command line", allow_abbrev=False
    )
    asked = generate.add_argument_group("request")
    asked.add_argument("--prompt", action="append",
                       help="may be given several times; without it: standard input, "
                       "one prompt a line")  # fmt: skip
    asked.add_argument("--max-new-tokens", type=human_int, default=128, help="(128)")
    asked.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest (0)")
    asked.add_argument("--chat", action="store_true", help="put prompts through the chat template")
    _add_engine_flags(generate, run=_generate)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser, run: object) -> None:
    parser.add_argument("place", nargs="?", metavar="MODEL", help="same as --model-path")
    for group in _groups():
        section = parser.add_argument_group(type(group).__name__.removesuffix("Config").lower())
        for each in fields(group):
            for name in names_of(each):
                section.add_argument(flag(name), dest=name, **_reading(each, name))
    parser.add_argument("--log-level", default="info",
                        choices=("debug", "info", "warning", "error"), help="(info)")  # fmt: skip
    parser.add_argument("--explain", action="store_true",
                        help="print every setting, its value and why, and leave")  # fmt: skip
    known = [name for action in parser._actions for name in action.option_strings]
    parser.set_defaults(run=run, known=known)


def _reading(each: Field[Any], name: str) -> dict[str, Any]:
    """How argparse reads a setting under one of its names."""
    kind, doc, default = kind_of(each), each.metadata["help"], each.default
    if name != each.name:
        doc, default = f"same as {flag(each.name)}", argparse.SUPPRESS
    if kind == "bool":
        return {"action": "store_true", "default": default, "help": doc}
    if kind == "Sequence":
        return {"action": _Extend, "nargs": "+", "type": integers, "default": default, "help": doc}
    return {
        "default": default,
        "choices": each.metadata["legal"].choices or None,
        "type": _READERS[kind],
        "help": doc + ("" if default in (None, argparse.SUPPRESS) else f" ({default})"),
    }


def _log_to_stderr(level: str, rank: str) -> None:
    """rank: as the lines of one of several ranks begin, ` TP0`, or nothing."""
    logging.basicConfig(
        level=level.upper(),
        format=f"[%(asctime)s{rank}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        stream=sys.stderr,
    )


def _explain(options: argparse.Namespace) -> int:
    from treadle.tools.explain import explain

    print(explain(EngineConfig.from_flags(engine_flags(options))))
    return 0


def _serve(options: argparse.Namespace) -> int:
    from treadle.tools.serve import serve

    return serve(options, engine_flags(options))


def _generate(options: argparse.Namespace) -> int:
    from treadle.tools.generate import generate

    return generate(options, engine_flags(options))


if __name__ == "__main__":
    sys.exit(main())
