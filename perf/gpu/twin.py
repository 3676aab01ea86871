"""The same steps on two executors of the same weights, one eager and one with graphs.

Knows steps and results. Both run the same padded buckets, so tokens and logits must agree bit for
bit; the first step in which they do not raises.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import numpy as np
import torch

from treadle.graphs.backends import Eager
from treadle.graphs.buckets import Buckets
from treadle.graphs.capture import all_keys
from treadle.graphs.models.spec import DecoderSpec
from treadle.graphs.step import Step
from treadle.perf.gpu.player import Work
from treadle.perf.gpu.rig import Rig, Room
from treadle.perf.gpu.sections import Failed, Unmeasured, Values

BUCKETS = Buckets((1, 2, 4, 8), (8, 32, 64))
_IDLE_S = 0.03  # longer than the executor waits before it captures
_SLOTS = BUCKETS.decode_rows[-1]


class Twin:
    """Slots are restarted before they reach the longest sequence."""

    def __init__(self, spec: DecoderSpec, device: str, page_size: int) -> None:
        """Raises: Unmeasured when there are no graphs here."""
        room = Room(_SLOTS, 2 * _SLOTS * spec.max_position, BUCKETS, page_size)
        seed = random.randrange(2**31)
        self.eager = Rig(spec, room, device, backend=Eager(), seed=seed)
        self.eager.probe.is_eager = True
        self.compiled = self.eager.try_compile_ahead()
        self.graphs = Rig(spec, room, device, in_background=True, seed=seed)
        if isinstance(self.graphs.executor.runner.graphs.backend, Eager):
            raise Unmeasured("no graphs on this machine: the host kernels are not built")
        self.rigs = (self.graphs, self.eager)
        for rig in self.rigs:
            rig.probe.keeps_logits = True
        self.player = self.graphs.player
        self.num_steps = self.num_replayed = 0

    async def close(self) -> None:
        for rig in self.rigs:
            await rig.close()

    async def compare(self, step: Step) -> bool:
        """Whether graphs ran it. Raises: Failed."""
        handles = [rig.executor.launch(step) for rig in self.rigs]
        if step.plan.is_constrained:
            await asyncio.sleep(random.choice((0.0, _IDLE_S)))  # both sides of an idle capture
            mask = (
                np.random.default_rng().random((step.plan.num_rows, self.player.vocab_size)) < 0.5
            )
            mask[:, 7] = True
            for handle in handles:
                handle.sample(mask)
        ours, theirs = [await handle for handle in handles]
        logits = [rig.probe.logits.pop(step.seq) for rig in self.rigs]
        shape = f"{step.plan.mode} of {step.plan.num_rows} rows, {step.plan.num_tokens} tokens"
        if logits[0].isnan().any():
            raise Failed(f"{shape}: logits are not numbers", {})
        if not torch.equal(*logits):
            worst = (logits[0] - logits[1]).abs().max().item()
            raise Failed(f"{shape}: logits differ, at most by {worst:.3g}", {"step": step.seq})
        if ours.token_ids.tolist() != theirs.token_ids.tolist():
            raise Failed(f"{shape}: tokens differ", {"step": step.seq})
        self.num_steps += 1
        self.num_replayed += ours.replayed
        return ours.replayed

    async def while_capturing(self, limit_s: float) -> Values:
        """Random steps until every graph has been swapped in."""
        planned, table = set(all_keys(BUCKETS)), self.graphs.executor.runner.graphs
        deadline, eager = time.monotonic() + limit_s, 0
        while missing := {key for key in planned if key not in table}:
            if self.graphs.probe.not_captured:
                key, reason = next(iter(self.graphs.probe.not_captured.items()))
                raise Failed(f"no graph for {key}: {reason}", {})
            if time.monotonic() > deadline:
                raise Failed(f"{len(missing)} graphs missing after {limit_s:.0f} s", {})
            for _ in range(3):
                eager += not await self.compare(self.random_step())
            await asyncio.sleep(_IDLE_S)
        return {"steps": self.num_steps, "eager": eager, "graphs": len(planned)}

    async def every_graph(self) -> Values:
        """A step for each graph; then all of them must have been replayed."""
        before = self.graphs.probe.replayed.copy()
        for rows in BUCKETS.decode_rows:
            for step in (self._decode(rows), self._decode(rows, constrained=True)):
                await self._replayed(step)
            for tokens in BUCKETS.prefill_tokens:
                if rows <= tokens:
                    await self._replayed(self._prefill(rows, tokens))
        missing = {key for key in all_keys(BUCKETS) if not self.graphs.probe.replayed[key]}
        if missing:
            raise Failed(f"never replayed: {', '.join(map(str, missing))}", {})
        replays = self.graphs.probe.replayed - before
        return {"steps": self.num_steps, "replays": sum(replays.values()), "graphs": len(replays)}

    async def long_decodes(self, count: int) -> Values:
        """Every row crosses pages and the window; draws and bans in between."""
        for slot in range(_SLOTS):
            self.player.restart(slot)
        await self._replayed(self.player.step([Work(s, self.player.tokens(3)) for s in range(8)]))
        for number in range(count):
            banned = [(0, number), (3, 7)] if number % 5 == 4 else []
            warm = 0.9 * (number % 3 == 1)
            rows = [Work(slot) for slot in range(_SLOTS)]
            await self._replayed(self.player.step(rows, temperature=warm, banned=banned))
        return {"steps": count, "length": self.player.length(0)}

    def random_step(self) -> Step:
        kind = random.choice(("decode", "decode", "prefill", "mixed"))
        rows = random.randint(1, _SLOTS)
        if kind == "decode":
            return self._decode(rows, constrained=random.random() < 0.3)
        return self._prefill(
            rows, random.randint(rows, BUCKETS.prefill_tokens[-1]), kind == "mixed"
        )

    async def mixed(self, count: int) -> Values:
        """Decodes beside chunks, some of which sample nothing."""
        for _ in range(count):
            rows = random.randint(2, _SLOTS)
            tokens = random.randint(rows, BUCKETS.prefill_tokens[-1])
            await self._replayed(self._prefill(rows, tokens, is_mixed=True))
        return {"steps": count}

    async def _replayed(self, step: Step) -> None:
        if not await self.compare(step):
            plan = step.plan
            raise Failed(f"{plan.mode} of {plan.num_rows} rows ran eagerly", {"step": step.seq})

    def _decode(self, rows: int, constrained: bool = False) -> Step:
        slots = random.sample(range(_SLOTS), rows)
        for slot in slots:
            if not 0 < self.player.length(slot) < self.graphs.spec.max_position:
                self.player.restart(slot, random.randint(1, 40))  # with KV that both have
        warm = random.choice((0.0, 1.0))
        work = [Work(slot) for slot in slots]
        return self.player.step(work, temperature=warm, constrained=constrained)

    def _prefill(self, rows: int, tokens: int, is_mixed: bool = False) -> Step:
        """So many tokens in so many rows; the first of a mixed step decode."""
        slots = random.sample(range(_SLOTS), rows)
        work: list[Work] = []
        for slot, count in zip(slots, _split(tokens, rows), strict=True):
            decodes = is_mixed and not work
            room = self.graphs.spec.max_position - self.player.length(slot)
            if room < count or random.random() < 0.3:
                self.player.restart(slot, 5 if decodes else 0)
            decodes = decodes and self.player.length(slot) > 0
            samples = not is_mixed or decodes or random.random() < 0.7
            work.append(Work(slot, None if decodes else self.player.tokens(count), samples))
        return self.player.step(work, temperature=random.choice((0.0, 1.0)))


def _split(total: int, parts: int) -> Sequence[int]:
    """Random positive numbers that add up."""
    cuts = sorted(random.sample(range(1, total), parts - 1))
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
