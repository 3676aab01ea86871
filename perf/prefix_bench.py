"""What the prefix cache is worth on prompts that share a prefix, beside the same without it.

`python -m treadle.perf.prefix_bench`; each side runs in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from treadle.perf.workload import Workload, run_treadle
from treadle.tools.model_source import resolve_model


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="treadle.perf.prefix_bench", description=__doc__)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shared-prefix", type=int, default=768)
    parser.add_argument("--unique-tokens", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=("with", "without"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _options(arguments)
    if options.side is not None:
        load = Workload(
            input_len=options.shared_prefix + options.unique_tokens,
            output_len=options.output_len,
            requests=options.num_prompts,
            concurrency=options.max_concurrency,
            shared_prefix=options.shared_prefix,
        )
        flags = {"disable_radix_cache": options.side == "without"}
        path = resolve_model(options.model).path
        print(json.dumps(asyncio.run(run_treadle(load, path, options.dtype, flags))))
        return 0
    ratios = []
    for number in range(options.rounds):
        cached, plain = (_run(side, arguments) for side in ("with", "without"))
        ratios.append(cached["tokens_per_s"] / plain["tokens_per_s"])
        print(
            f"round {number + 1} ({cached['dtype']}): {cached['tokens_per_s']:.1f} output tok/s at "
            f"a hit rate of {cached['hit_rate']:.1%}, {plain['tokens_per_s']:.1f} with "
            f"--disable-radix-cache: {ratios[-1]:.2f} x",
            flush=True,
        )
    print(f"median: {statistics.median(ratios):.2f} x")
    return 0


def _run(side: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "treadle.perf.prefix_bench", *arguments, "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
