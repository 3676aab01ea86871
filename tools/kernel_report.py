"""What every Triton kernel takes of a GPU, compiled without one: registers, stack, spills, memory.

Knows the shapes worth watching; how kernels launch is their callers' business, recorded as it is.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from treadle.kernels.gpu import (
    activation,
    bitmask,
    kv_store,
    logprobs,
    norm,
    offline,
    paged_attention,
    penalties,
    rope,
    sampling,
)
from treadle.kernels.paged_attention import AttentionMeta

DOCUMENT = Path(__file__).resolve().parent.parent / "docs/kernels.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Table = dict[tuple[str, str, str], offline.Resources]  # by kernel, case, target


def cases() -> dict[str, Callable[[], object]]:
    """Launches worth watching, by a short name of their shape."""
    found: dict[str, Callable[[], object]] = {}
    for dim in (128, 1024, 8192):
        x, weight = torch.empty(64, dim, dtype=BF16), torch.empty(dim, dtype=BF16)
        found[f"norm D={dim}"] = partial(norm.rms_norm, x, weight, 1e-6)
        found[f"add norm D={dim}"] = partial(norm.add_rms_norm, x, x, weight, 1e-6)
    for dim, rotary_dim, interleaved in ((128, 128, False), (128, 128, True), (80, 32, False)):
        found[f"rope D={dim} rotary={rotary_dim} interleaved={interleaved}"] = _rope(
            dim, rotary_dim, interleaved
        )
    gate_up = torch.empty(8, 2 * 14336, dtype=BF16)
    found["silu"] = lambda: activation.silu_and_mul(gate_up)
    found["gelu"] = lambda: activation.gelu_tanh_and_mul(gate_up)
    k = torch.empty(8, 8, 128, dtype=BF16)
    cache, slots = torch.empty(64, 8, 128, dtype=BF16), torch.zeros(8, dtype=torch.int64)
    found["K=8 D=128"] = lambda: kv_store.store_kv(k, k, cache, cache, slots)
    found.update(_attention_cases())
    found.update(_logit_cases())
    return found


def _rope(dim: int, rotary_dim: int, interleaved: bool) -> Callable[[], object]:
    q, k = torch.empty(8, 32, dim, dtype=BF16), torch.empty(8, 8, dim, dtype=BF16)
    table, positions = torch.empty(64, rotary_dim), torch.zeros(8, dtype=torch.int64)
    return lambda: rope.apply_rope(q, k, positions, table, interleaved)


def _attention_cases() -> dict[str, Callable[[], object]]:
    shapes = [  # H, K, D, dtype
        (9, 3, 64, BF16), (32, 32, 80, BF16), (32, 32, 96, BF16), (32, 8, 128, BF16),
        (40, 8, 128, BF16), (64, 8, 128, BF16), (32, 8, 128, FP16), (16, 4, 256, BF16),
        (32, 8, 64, FP32), (32, 8, 128, FP32), (16, 4, 256, FP32),
    ]  # fmt: skip
    batches = {  # rows, queries of each: every kernel and every tile
        "one row": (1, 1), "1024 rows": (1024, 1), "short chunk": (1, 4), "chunk": (1, 512)
    }  # fmt: skip
    found: dict[str, Callable[[], object]] = {}
    for (q_heads, kv_heads, dim, dtype), (batch, size) in itertools.product(
        shapes, batches.items()
    ):
        kind = str(dtype).removeprefix("torch.")
        name = f"H={q_heads} K={kv_heads} D={dim} {kind}, {batch}"
        found[name] = _attention(q_heads, kv_heads, dim, dtype, size, is_full=False)
    for dim, (batch, size) in itertools.product((64, 128, 256), batches.items()):
        name = f"H=32 K=8 D={dim} bfloat16 window sinks softcap, {batch}"
        found[name] = _attention(32, 8, dim, BF16, size, is_full=True)
    return found


def _attention(
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    size: tuple[int, int],
    is_full: bool,
) -> Callable[[], object]:
    rows, q_len = size
    cache = torch.empty(64, kv_heads, dim, dtype=dtype)
    q = torch.empty(rows * q_len, q_heads, dim, dtype=dtype)
    lengths = torch.zeros(rows + 1, dtype=torch.int32)
    table = torch.zeros(rows, 32, dtype=torch.int32)
    meta = AttentionMeta(
        lengths, lengths[:rows], torch.zeros(rows, dtype=torch.int64), table, 16, q_len, 512
    )
    sinks, window, softcap = (torch.empty(q_heads), 128, 30.0) if is_full else (None, None, None)
    return lambda: paged_attention.paged_attention(
        q, cache, cache, meta, dim**-0.5, window, None, sinks, softcap
    )


def _logit_cases() -> dict[str, Callable[[], object]]:
    rows, vocab = 8, 151936
    logits, words = torch.empty(rows, vocab), torch.zeros(rows, vocab // 32, dtype=torch.int32)
    ids, ones = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    counts = torch.zeros(rows, vocab, dtype=torch.int32)
    filters = sampling.Filters(ids.int(), ones, ones)
    return {
        "greedy": lambda: sampling.sample(logits, None, ids, ids),
        "tempered": lambda: sampling.sample(logits, ones, ids, ids),
        "filtered": lambda: sampling.sample(logits, ones, ids, ids, filters),
        "a rank's part": lambda: sampling.best_keys(logits, ones, ids, ids, vocab, ones),
        "bitmask": lambda: bitmask.apply_bitmask(logits, words),
        "penalties": lambda: penalties.penalize(logits, ids, counts, words, ones, ones, ones),
        "count": lambda: penalties.count_tokens(counts, ids, ids),
        "logprobs": lambda: logprobs.logprobs(logits, ids.view(rows, 1)),
    }


def measure(only: str, targets: Sequence[str]) -> Table:
    """Every kernel of every case whose name has `only` in it."""
    table: Table = {}
    chosen = {name: call for name, call in cases().items() if only in name}
    for (case, call), target in itertools.product(chosen.items(), targets):
        for launch in offline.record(call, offline.TARGETS[target]):
            label = f"{case}, first pass" if launch.kwargs.get("IS_FIRST") else case
            if (launch.name, label, target) not in table:
                table[launch.name, label, target] = launch.compile(target)
    return table


def render(table: Table) -> str:
    """Markdown: a row per kernel and case, a column per target."""
    targets = list(dict.fromkeys(target for _, _, target in table))
    lines = ["| kernel | case | " + " | ".join(targets) + " |", "|---" * (2 + len(targets)) + "|"]
    for kernel, case in dict.fromkeys((kernel, case) for kernel, case, _ in table):
        cells = [_cell(table.get((kernel, case, target))) for target in targets]
        lines.append(f"| {kernel} | {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(used: offline.Resources | None) -> str:
    if used is None:
        return "-"
    return f"{used.registers} / {used.stack} / {used.spills} / {used.shared}"


def parse(document: str) -> Table:
    """The table that `render` wrote."""
    table: Table = {}
    targets: list[str] = []
    for line in document.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "kernel":
            targets = cells[2:]
            continue
        for target, cell in zip(targets, cells[2:], strict=False):
            if re.match(r"\d", cell):
                numbers = [int(number) for number in cell.split("/")]
                table[cells[0], cells[1], target] = offline.Resources(*numbers)
    return table


def new_spills(before: Table, now: Table) -> list[str]:
    """Where more goes to the stack than the committed table says."""
    none = offline.Resources(0, 0, 0, 0)
    return [
        f"{kernel} ({case}) on {target}: {was.spills} -> {used.spills} instructions on the stack"
        for (kernel, case, target), used in now.items()
        if used.spills > (was := before.get((kernel, case, target), none)).spills
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a case's name; nothing is written")
    parser.add_argument("--targets", nargs="+", default=list(offline.TARGETS))
    parser.add_argument("--accept", action="store_true", help="write the table with its new spills")
    given = parser.parse_args(argv)
    document = DOCUMENT.read_text()
    table = measure(given.only, given.targets)
    rendered = render(table)
    print(rendered)
    worse = new_spills(parse(document), table)
    for line in worse:
        print("new spill:", line, file=sys.stderr)
    is_whole = not given.only and given.targets == list(offline.TARGETS)
    if is_whole and (given.accept or not worse):
        head, _, rest = document.partition(BEGIN)
        DOCUMENT.write_text(f"{head}{BEGIN}\n{rendered}\n{END}{rest.partition(END)[2]}")
    return 1 if worse and not given.accept else 0


if __name__ == "__main__":
    sys.exit(main())
