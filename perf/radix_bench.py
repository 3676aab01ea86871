"""Cost of the prefix cache on a trace of conversations, beside two straightforward trees.

Knows no engine, request or device: a request is what the tree sees of it, and pages are numbers.

The trace: conversations over shared system prompts, 2k to 8k tokens a request, 16 requests at once,
page size 1 (the dearest). A request matches and locks its prefix, evicts what its pages need,
inserts after each prefill chunk and at its end, and unlocks. The other trees are given lists of
token ids. Costs are CPU time of the thread, so that a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from treadle.engine.eviction import make_policy
from treadle.engine.radix_cache import Node, RadixCache
from treadle.perf.plain_trees import DictPerNode, DictPerToken

CHUNK_TOKENS = 2048
MAX_RUNNING = 16
SYSTEM_PROMPTS = 32
PROBE_TOKENS, PROBE_NODES = 4096, 10
GROWTH = (1_000, 10_000, 100_000, 1_000_000)

Turn = tuple[bytes, int]  # a conversation with the answer it is going to get; the answer's tokens


def trace(num_requests: int, conversations: int, seed: int) -> Iterator[Turn]:
    """Turns of open conversations in random order; one that nears 8k tokens is replaced."""
    rng = random.Random(seed)
    systems = [rng.randbytes(4 * rng.randrange(500, 1500)) for _ in range(SYSTEM_PROMPTS)]

    def opened() -> bytes:
        system = rng.choice(systems)
        return system + rng.randbytes(4 * rng.randrange(2000, 2400) - len(system))

    texts = [opened() for _ in range(conversations)]
    for _ in range(num_requests):
        place = rng.randrange(conversations)
        num_output = rng.randrange(50, 400)
        texts[place] += rng.randbytes(4 * (rng.randrange(50, 400) + num_output))
        yield texts[place], num_output
        if len(texts[place]) > 4 * 7200:
            texts[place] = opened()


class Tree(Protocol):
    """What the replay needs. Each tree has its own form of tokens and of a path's end."""

    name: str

    def read(self, tokens: bytes) -> Any: ...  # not timed
    def hold(self, pages: array[int]) -> Any: ...  # page ids in the tree's own form, not timed
    def match(self, tokens: Any, limit: int) -> tuple[Any, Sequence[int]]: ...

    def insert(self, tokens: Any, pages: Any, known: tuple[Any, int], end: int) -> tuple[Any, int]:
        """Adds the first `end` tokens; returns the path's end and how many were there.

        known: a locked node and its number of tokens, which the tree has for sure.
        """

    def lock(self, node: Any) -> None: ...
    def unlock(self, node: Any) -> None: ...
    def evict(self, num_pages: int) -> Sequence[int]: ...


class Radix:
    """The engine's."""

    name = "treadle"

    def __init__(self) -> None:
        self.cache = RadixCache(1, make_policy("lru", {}))
        self.lock, self.unlock, self.evict = self.cache.lock, self.cache.unlock, self.cache.evict

    def read(self, tokens: bytes) -> bytes:
        return tokens

    def hold(self, pages: array[int]) -> array[int]:
        return pages

    def match(self, tokens: bytes, limit: int) -> tuple[Node, array[int]]:
        found = self.cache.match(tokens, None, limit)
        self.cache.count_hit(found.node)
        return found.node, found.pages

    def insert(
        self, tokens: bytes, pages: Any, known: tuple[Node, int], end: int
    ) -> tuple[Node, int]:
        after, start = known
        part = tokens[4 * start : 4 * end]
        done = self.cache.insert(part, pages[start:end], None, after=after)
        return done.node, start + done.num_present_tokens


class Samples(list[int]):
    """Nanoseconds."""

    def stop(self, started: int) -> None:
        self.append(time.thread_time_ns() - started)

    def us(self, percent: int) -> float:
        return sorted(self)[len(self) * percent // 100] / 1000

    def mean_us(self) -> float:
        return statistics.fmean(self) / 1000


@dataclass(slots=True)
class Costs:
    """One sample per request."""

    match: Samples = field(default_factory=Samples)  # and lock
    insert: Samples = field(default_factory=Samples)  # with moving the lock, and unlock
    evict: Samples = field(default_factory=Samples)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


def added(*parts: Samples) -> Samples:
    return Samples(sum(row) for row in zip(*parts, strict=True))


class Replay:
    """Drives a tree as the engine would, over a pool of `num_pages`."""

    def __init__(self, tree: Tree, num_pages: int) -> None:
        self.tree = tree
        self.free = array("i", range(num_pages))
        self.costs = Costs()
        self.running: deque[tuple[Any, Any, tuple[Any, int], int]] = deque()

    def run(self, turns: Iterator[Turn]) -> Costs:
        for tokens, num_output in turns:
            if len(self.running) == MAX_RUNNING:
                self.finish()
            self.start(self.tree.read(tokens), len(tokens) // 4, num_output)
        while self.running:
            self.finish()
        return self.costs

    def start(self, tokens: Any, num_tokens: int, num_output: int) -> None:
        tree, costs = self.tree, self.costs
        prompt_len = num_tokens - num_output
        started = time.thread_time_ns()
        node, found = tree.match(tokens, prompt_len - 1)
        tree.lock(node)
        costs.match.stop(started)
        costs.num_prompt_tokens += prompt_len
        costs.num_cached_tokens += len(found)
        count = num_tokens - len(found)
        started = time.thread_time_ns()
        freed = tree.evict(count - len(self.free)) if count > len(self.free) else ()
        costs.evict.stop(started)
        self.free.extend(freed)
        assert count <= len(self.free), "the pool is smaller than what runs at once"
        ids = array("i", found)
        ids.extend(self.free[-count:])
        pages = tree.hold(ids)
        del self.free[-count:]
        costs.insert.append(0)
        known = node, len(found)
        for end in (*range(len(found) + CHUNK_TOKENS, prompt_len, CHUNK_TOKENS), prompt_len):
            known = self.commit(tokens, pages, known, end)
        self.running.append((tokens, pages, known, len(costs.insert) - 1))

    def commit(
        self, tokens: Any, pages: Any, known: tuple[Any, int], end: int, row: int = -1
    ) -> tuple[Any, int]:
        tree = self.tree
        started = time.thread_time_ns()
        node, num_present = tree.insert(tokens, pages, known, end)
        tree.lock(node)
        tree.unlock(known[0])
        self.costs.insert[row] += time.thread_time_ns() - started
        self.free.extend(pages[known[1] : num_present])
        return node, end

    def finish(self) -> None:
        tokens, pages, known, row = self.running.popleft()
        node, _ = self.commit(tokens, pages, known, len(pages), row)
        started = time.thread_time_ns()
        self.tree.unlock(node)
        self.costs.insert[row] += time.thread_time_ns() - started


def put(cache: RadixCache, tokens: bytes, first_page: int) -> None:
    """Inserts a sequence as a path of PROBE_NODES nodes."""
    length, node = len(tokens) // 4, cache.match(b"", None, 0).node
    cache.lock(node)
    cuts = [length * part // PROBE_NODES for part in range(PROBE_NODES + 1)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        pages = range(first_page + start, first_page + end)
        added = cache.insert(tokens[4 * start : 4 * end], pages, None, after=node).node
        cache.lock(added)
        cache.unlock(node)
        node = added
    cache.unlock(node)


def growth_row(num_tokens: int, repeats: int, rng: random.Random) -> tuple[str, float]:
    """Costs of single calls on a tree that holds so many tokens beside one probe."""
    cache = RadixCache(1, make_policy("lru", {}))
    probes = [rng.randbytes(4 * PROBE_TOKENS) for _ in range(num_tokens // PROBE_TOKENS + 1)]
    for number, tokens in enumerate([*probes, rng.randbytes(4 * (num_tokens % PROBE_TOKENS))]):
        put(cache, tokens, number * PROBE_TOKENS)
    same, other, miss, evict = Samples(), Samples(), Samples(), Samples()
    for _ in range(repeats):
        for samples, tokens in (
            (same, probes[0]),
            (other, rng.choice(probes)),
            (miss, rng.randbytes(4 * PROBE_TOKENS)),
        ):
            started = time.thread_time_ns()
            found = cache.match(tokens, None, PROBE_TOKENS)
            samples.stop(started)
            assert found.num_tokens == (0 if samples is miss else PROBE_TOKENS)
    for _ in range(min(repeats, num_tokens)):
        started = time.thread_time_ns()
        cache.evict(1)
        evict.stop(started)
    text = (f"{num_tokens:>12,} | {same.us(50):>9.1f} {same.us(99):>9.1f} | {other.us(50):>9.1f} "
            f"{other.us(99):>9.1f} | {miss.us(50):>9.1f} | {evict.us(50):>9.1f}")  # fmt: skip
    return text, same.us(50)


def growth_table(repeats: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    yield "match of 4,096 tokens, us: the same again | any of the tree | absent | evict one page"
    yield f"other tokens | {'p50':>9} {'p99':>9} | {'p50':>9} {'p99':>9} | {'p50':>9} | {'p50':>9}"
    medians = []
    for num_tokens in GROWTH:
        text, median = growth_row(num_tokens, repeats, rng)
        medians.append(median)
        yield text
    yield f"the same again, {GROWTH[-1]:,} / {GROWTH[0]:,}: {medians[-1] / medians[0]:.2f} x"


HEADER = (f"{'tree':<15} {'mean us':>9} {'p50':>9} {'p99':>9} | {'match':>9} {'insert':>9} "
          f"{'evict':>9} | hit rate")  # fmt: skip


def cost_row(name: str, costs: Costs) -> str:
    total = added(costs.match, costs.insert, costs.evict)
    return (
        f"{name:<15} {total.mean_us():>9.1f} {total.us(50):>9.1f} {total.us(99):>9.1f} |"
        f" {costs.match.mean_us():>9.1f} {costs.insert.mean_us():>9.1f}"
        f" {costs.evict.mean_us():>9.1f} | {costs.hit_rate:.1%}"
    )


def comparison(num_requests: int, num_pages: int, seed: int) -> Iterator[str]:
    """The same slice of a trace on all three trees."""
    conversations = max(1, num_pages // 2500)  # at about 5,000 tokens each: twice the pool
    yield f"side by side: {num_requests:,} requests, pool of {num_pages:,} tokens"
    yield HEADER
    found = {}
    for tree in (Radix(), DictPerNode(), DictPerToken()):
        found[tree.name] = Replay(tree, num_pages).run(trace(num_requests, conversations, seed))
        yield cost_row(tree.name, found[tree.name])
    ours = found.pop("treadle")
    for name, costs in found.items():
        alike = [added(c.match, c.insert) for c in (costs, ours)]
        total = [added(c.match, c.insert, c.evict) for c in (costs, ours)]
        yield (f"{name} / treadle: {total[0].mean_us() / total[1].mean_us():.0f} x in all, "
               f"{alike[0].mean_us() / alike[1].mean_us():.0f} x without eviction")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="treadle.perf.radix_bench", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--cached-tokens", type=int, default=1_000_000, help="size of the pool")
    parser.add_argument("--slice", type=int, default=300, help="requests beside the other trees")
    parser.add_argument("--slice-cached-tokens", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=2000, help="of one call, for the growth")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    conversations = max(1, options.cached_tokens // 2500)
    print(f"{options.requests:,} requests, pool of {options.cached_tokens:,} tokens")
    print(HEADER)
    turns = trace(options.requests, conversations, options.seed)
    print(cost_row("treadle", Replay(Radix(), options.cached_tokens).run(turns)), flush=True)
    for line in growth_table(options.repeats, options.seed):
        print(line, flush=True)
    for line in comparison(options.slice, options.slice_cached_tokens, options.seed):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
