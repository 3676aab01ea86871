"""Everything that only a GPU can show, in one command: correctness, speed, memory.

`python -m treadle.perf.gpu_check [--only SECTION ...] [--resume FILE] [--json FILE]`. Every section
runs in a process of its own within its own time limit, all of them within eight minutes. No
network, no checkpoint: models have random weights. Knows sections by name, not what they measure.

Exit status: 0 all rows are fine, 1 some failed, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from treadle.perf.gpu import worker
from treadle.perf.gpu.results import Results, header, line
from treadle.perf.gpu.sections import SECTIONS, Row, Section, Setting
from treadle.perf.gpu.supervisor import Supervisor

TOTAL_S = 480.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    setting = Setting("cpu", is_tiny=True) if options.rehearse else Setting()
    if options.child:
        (section,) = (each for each in SECTIONS if each.name == options.child)
        return worker.main(section, setting)
    chosen = [each for each in SECTIONS if not options.only or each.name in options.only]
    if not options.rehearse and not _has_gpu():
        print(
            "No CUDA device here: nothing was measured. With one it would run "
            + "; ".join(f"{each.name} ({each.what})" for each in chosen)
        )
        return 2
    try:
        results = Results(options.json or options.resume, options.resume)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    run(chosen, setting, results, options.limit)
    return 1 if results.failures else 0


def run(sections: Sequence[Section], setting: Setting, results: Results, limit_s: float) -> None:
    """Prints the table while rows come, then how many of them are not fine."""
    started = time.monotonic()
    print(header(), flush=True)
    for row in results.rows:
        print(line(row), flush=True)

    def emit(row: Row) -> None:
        results.add(row)
        print(line(row), flush=True)

    supervisor = Supervisor(setting, emit)
    for section in sections:
        left = limit_s - (time.monotonic() - started)
        if left < 1:
            reason = f"not reached within {limit_s:.0f} s; --resume continues"
            emit(Row(section.name, "all", {}, 0.0, reason))
        else:
            supervisor.run(section, results.done(section.name), min(left, section.limit_s))
    print(
        f"{len(results.rows)} rows in {time.monotonic() - started:.0f} s: "
        f"{len(results.failures)} failed, {len(results.unmeasured)} not measured"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(
        prog="treadle.perf.gpu_check",
        description=(__doc__ or "").partition("\n")[0],
        epilog="; ".join(f"{section.name}: {section.what}" for section in SECTIONS),
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", default=[])
    parser.add_argument("--json", type=Path, help="write rows here as they come")
    parser.add_argument("--resume", type=Path, help="keep this file's good rows, add the others")
    parser.add_argument("--limit", type=float, default=TOTAL_S, help="seconds; default: 480")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on the CPU, to try the command itself"
    )
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
