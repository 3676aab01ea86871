"""Speed beside transformers' `generate` on the same weights, dtype and threads, in one run.

Each side runs in a process of its own, in turns; the figure is the ratio within a round.
`python -m treadle.perf.bench --help` tells the settings; `make bench` runs the standard ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.perf.workload import Workload, run_treadle
from treadle.tools.model_source import resolve_model

FIRST_TOKEN_PROMPT = "The capital of France is"


def run_transformers(load: Workload, path: Path, dtype: str) -> dict[str, Any]:
    """Output tokens a second, one request at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=getattr(torch, dtype)
    ).eval()

    def generate(prompt: Sequence[int], count: int) -> int:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=count, min_new_tokens=count,
        )  # fmt: skip
        return int(out.shape[1]) - len(prompt)

    prompts = load.prompts()
    generate(prompts[0], 4)  # warm-up
    started = time.perf_counter()
    generated = sum(generate(prompt, load.output_len) for prompt in prompts)
    return {"tokens_per_s": generated / (time.perf_counter() - started), "dtype": dtype}


def time_to_first_token(side: str, path: Path, dtype: str) -> float:
    """Seconds from the start of a process to its first token, weights loaded on the way."""
    if side == "treadle":
        command = [sys.executable, "-m", "treadle.tools.cli", "generate", str(path), "--dtype",
                   dtype, "--prompt", FIRST_TOKEN_PROMPT, "--max-new-tokens", "1"]  # fmt: skip
    else:
        command = [sys.executable, "-c", _TRANSFORMERS_FIRST_TOKEN, str(path), dtype]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        elapsed = time.perf_counter() - started
        process.stdout.read()
    if not first:
        raise RuntimeError(f"{side} printed nothing")
    return elapsed


_TRANSFORMERS_FIRST_TOKEN = f"""
import os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name = os.path.split(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=getattr(torch, sys.argv[2]))
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
ids = tokenizer({FIRST_TOKEN_PROMPT!r}, return_tensors="pt")
out = model.generate(**ids, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(out[0, -1:]), flush=True)
"""


def _side(side: str, load: Workload, path: Path, dtype: str) -> dict[str, Any]:
    """Runs one side in its own process."""
    command = [sys.executable, "-m", "treadle.perf.bench", "--side", side, "--model", str(path),
               "--dtype", dtype, "--input-len", str(load.input_len), "--output-len",
               str(load.output_len), "--num-prompts", str(load.requests), "--max-concurrency",
               str(load.concurrency), "--seed", str(load.seed)]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="treadle.perf.bench", description=__doc__)
    parser.add_argument("--model", help="a GGUF file; default: the embedded model")
    parser.add_argument("--dtype", default="auto", help="on both sides (what Treadle resolves)")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--reference-prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS on both sides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=("treadle", "transformers"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    path = resolve_model(options.model).path
    load = Workload(options.input_len, options.output_len, options.num_prompts,
                    options.max_concurrency, options.seed)  # fmt: skip
    if options.side == "treadle":
        print(json.dumps(asyncio.run(run_treadle(load, path, options.dtype, {}))))
    elif options.side == "transformers":
        print(json.dumps(run_transformers(load, path, options.dtype)))
    else:
        _compare(options, load, path)
    return 0


def _compare(options: argparse.Namespace, load: Workload, path: Path) -> None:
    alone = Workload(load.input_len, load.output_len, options.reference_prompts, 1, load.seed)
    ratios, starts = [], []
    for number in range(options.rounds):
        ours = _side("treadle", load, path, options.dtype)
        theirs = _side("transformers", alone, path, ours["dtype"])
        first = {side: time_to_first_token(side, path, ours["dtype"])
                 for side in ("treadle", "transformers")}  # fmt: skip
        ratios.append(ours["tokens_per_s"] / theirs["tokens_per_s"])
        starts.append(first["transformers"] / first["treadle"])
        print(
            f"round {number + 1} ({ours['dtype']}): treadle {ours['tokens_per_s']:.1f} tok/s at "
            f"concurrency {load.concurrency}, transformers {theirs['tokens_per_s']:.1f} one at a "
            f"time: {ratios[-1]:.2f} x; process start to first token {first['treadle']:.2f} s and "
            f"{first['transformers']:.2f} s: {starts[-1]:.2f} x",
            flush=True,
        )
    print(f"median: throughput {statistics.median(ratios):.2f} x, "
          f"start {statistics.median(starts):.2f} x")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
