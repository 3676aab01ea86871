"""Cost of the prefix cache on a trace of conversations, beside two straightforward trees.

Knows no engine, request or device: a request is what the tree sees of it, and pages are numbers.

The trace: conversations over shared system prompts, 2k to 8k tokens a request, 16 requests at once,
page size 1 (the dearest). A request matches and locks its prefix, evicts what its pages need,
inserts after each prefill chunk and at its end, and unlocks. The other trees are given lists of
token ids; both insert from the root and collect all leaves for an eviction.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from treadle.engine.eviction import make_policy
from treadle.engine.radix_cache import Node, RadixCache

CHUNK_TOKENS = 2048
MAX_RUNNING = 16
SYSTEM_PROMPTS = 32
PROBE_TOKENS, PROBE_NODES = 4096, 10
GROWTH = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: a conversation so far, with the answer that it is going to get."""

    tokens: bytes
    num_output: int  # tokens of the answer

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


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
        yield Turn(texts[place], num_output)
        if len(texts[place]) > 4 * 7200:
            texts[place] = opened()


class Tree(Protocol):
    """What the replay needs. Each tree has its own form of tokens and of a path's end."""

    name: str

    def read(self, tokens: bytes) -> Any: ...  # not timed
    def match(self, tokens: Any, limit: int) -> tuple[Any, Sequence[int]]: ...

    def insert(
        self, tokens: Any, pages: list[int], known: tuple[Any, int], end: int
    ) -> tuple[Any, int]:
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

    def match(self, tokens: bytes, limit: int) -> tuple[Node, array[int]]:
        found = self.cache.match(tokens, None, limit)
        self.cache.count_hit(found.node)
        return found.node, found.pages

    def insert(
        self, tokens: bytes, pages: list[int], known: tuple[Node, int], end: int
    ) -> tuple[Node, int]:
        after, start = known
        part = tokens[4 * start : 4 * end]
        done = self.cache.insert(part, pages[start:end], None, after=after)
        return done.node, start + done.num_present_tokens


@dataclass(slots=True, eq=False)
class Run:
    """Node of the straightforward trees."""

    parent: Run | None
    tokens: list[int]
    pages: list[int]
    last_access: int = 0
    locks: int = 0
    children: dict[int, Run] = field(default_factory=dict)  # by first token


class DictPerNode:
    """Runs of tokens as lists, compared token by token."""

    name = "dict per node"

    def __init__(self) -> None:
        self.root = Run(None, [], [], locks=1)
        self.clock = 0

    def read(self, tokens: bytes) -> list[int]:
        return array("i", tokens).tolist()

    def match(self, tokens: list[int], limit: int) -> tuple[Run, list[int]]:
        node, pages = self.descend(tokens[:limit])
        return node, pages

    def descend(self, tokens: list[int]) -> tuple[Run, list[int]]:
        self.clock += 1
        node, pages = self.root, list[int]()
        while len(pages) < len(tokens):
            child = node.children.get(tokens[len(pages)])
            if child is None:
                break
            common = 0
            for ours, theirs in zip(child.tokens, tokens[len(pages) :], strict=False):
                if ours != theirs:
                    break
                common += 1
            if common < len(child.tokens):
                child = self.split(child, common)
            child.last_access = self.clock
            pages += child.pages
            node = child
        return node, pages

    def split(self, node: Run, at: int) -> Run:
        assert node.parent is not None
        upper = Run(node.parent, node.tokens[:at], node.pages[:at], node.last_access, node.locks)
        node.parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[at:], node.pages[at:]
        upper.children[node.tokens[0]] = node
        return upper

    def insert(
        self, tokens: list[int], pages: list[int], known: tuple[Run, int], end: int
    ) -> tuple[Run, int]:
        node, present = self.descend(tokens[:end])
        return self.add(node, tokens, pages, len(present), end), len(present)

    def add(self, node: Run, tokens: list[int], pages: list[int], start: int, end: int) -> Run:
        if start == end:
            return node
        leaf = Run(node, tokens[start:end], pages[start:end], self.clock)
        node.children[tokens[start]] = leaf
        return leaf

    def lock(self, node: Run) -> None:
        step: Run | None = node
        while step is not None:
            step.locks += 1
            step = step.parent

    def unlock(self, node: Run) -> None:
        step: Run | None = node
        while step is not None:
            step.locks -= 1
            step = step.parent

    def evict(self, num_pages: int) -> list[int]:
        heap, stack = [], [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and not node.locks:
                heap.append((node.last_access, id(node), node))
        heapify(heap)
        freed: list[int] = []
        while len(freed) < num_pages and heap:
            _, _, node = heappop(heap)
            freed += node.pages
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens[0]]
            if not parent.children and not parent.locks:
                heappush(heap, (parent.last_access, id(parent), parent))
        return freed


class DictPerToken(DictPerNode):
    """One node, with its dictionary, per token."""

    name = "dict per token"

    def descend(self, tokens: list[int]) -> tuple[Run, list[int]]:
        self.clock += 1
        node, pages = self.root, list[int]()
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                break
            child.last_access = self.clock
            pages.append(child.pages[0])
            node = child
        return node, pages

    def add(self, node: Run, tokens: list[int], pages: list[int], start: int, end: int) -> Run:
        for place in range(start, end):
            leaf = Run(node, [tokens[place]], [pages[place]], self.clock)
            node.children[tokens[place]] = leaf
            node = leaf
        return node


@dataclass(slots=True)
class Costs:
    """Nanoseconds per request."""

    match: list[int] = field(default_factory=list)  # and lock
    insert: list[int] = field(default_factory=list)  # with moving the lock, and unlock
    evict: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def total(self) -> list[int]:
        return [sum(parts) for parts in zip(self.match, self.insert, self.evict, strict=True)]

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


class Replay:
    """Drives a tree as the engine would, over a pool of `num_pages`."""

    def __init__(self, tree: Tree, num_pages: int) -> None:
        self.tree = tree
        self.free = list(range(num_pages))
        self.costs = Costs()
        self.running: deque[tuple[Any, list[int], tuple[Any, int], int]] = deque()

    def run(self, turns: Iterator[Turn]) -> Costs:
        for turn in turns:
            if len(self.running) == MAX_RUNNING:
                self.finish()
            self.start(turn)
        while self.running:
            self.finish()
        return self.costs

    def start(self, turn: Turn) -> None:
        tree, costs = self.tree, self.costs
        tokens = tree.read(turn.tokens)
        prompt_len = turn.num_tokens - turn.num_output
        started = time.perf_counter_ns()
        node, found = tree.match(tokens, prompt_len - 1)
        tree.lock(node)
        costs.match.append(time.perf_counter_ns() - started)
        costs.num_prompt_tokens += prompt_len
        costs.num_cached_tokens += len(found)
        count = turn.num_tokens - len(found)
        started = time.perf_counter_ns()
        freed = tree.evict(count - len(self.free)) if count > len(self.free) else ()
        costs.evict.append(time.perf_counter_ns() - started)
        self.free.extend(freed)
        pages = [*found, *self.free[-count:]]
        del self.free[-count:]
        costs.insert.append(0)
        known = node, len(found)
        for end in (*range(len(found) + CHUNK_TOKENS, prompt_len, CHUNK_TOKENS), prompt_len):
            known = self.commit(tokens, pages, known, end)
        self.running.append((tokens, pages, known, len(costs.insert) - 1))

    def commit(
        self, tokens: Any, pages: list[int], known: tuple[Any, int], end: int, row: int = -1
    ) -> tuple[Any, int]:
        tree = self.tree
        started = time.perf_counter_ns()
        node, num_present = tree.insert(tokens, pages, known, end)
        tree.lock(node)
        tree.unlock(known[0])
        self.costs.insert[row] += time.perf_counter_ns() - started
        self.free.extend(pages[known[1] : num_present])
        return node, end

    def finish(self) -> None:
        tokens, pages, known, row = self.running.popleft()
        node, _ = self.commit(tokens, pages, known, len(pages), row)
        started = time.perf_counter_ns()
        self.tree.unlock(node)
        self.costs.insert[row] += time.perf_counter_ns() - started


def grown(num_tokens: int, rng: random.Random) -> tuple[RadixCache, list[bytes]]:
    """A tree with that many tokens beside a probe; and the sequences that are as long as it."""
    cache = RadixCache(1, make_policy("lru", {}))
    probes, next_page = [], 0
    lengths = [PROBE_TOKENS] + [PROBE_TOKENS] * (num_tokens // PROBE_TOKENS)
    for length in (*lengths, num_tokens % PROBE_TOKENS):
        tokens = rng.randbytes(4 * length)
        node = None
        cuts = [length * part // PROBE_NODES for part in range(PROBE_NODES + 1)]
        for start, end in zip(cuts, cuts[1:], strict=False):
            pages = array("i", range(next_page + start, next_page + end))
            done = cache.insert(tokens[4 * start : 4 * end], pages, None, after=node)
            cache.lock(done.node)
            if node is not None:
                cache.unlock(node)
            node = done.node
        assert node is not None
        cache.unlock(node)
        next_page += length
        if length == PROBE_TOKENS:
            probes.append(tokens)
    return cache, probes


def timed(repeats: int, prepare: Callable[[], Any], call: Callable[[Any], object]) -> list[int]:
    costs = []
    for _ in range(repeats):
        argument = prepare()
        started = time.perf_counter_ns()
        call(argument)
        costs.append(time.perf_counter_ns() - started)
    return costs


def growth_table(repeats: int, seed: int) -> Iterator[str]:
    """How the cost of one call depends on the size of the tree."""
    rng = random.Random(seed)
    yield f"{'other tokens':>13} {'match 4k p50':>13} {'p99':>7} {'miss p50':>9} {'evict 1 page':>13}"
    medians = []
    for num_tokens in GROWTH:
        cache, probes = grown(num_tokens, rng)

        def hit(tokens: bytes, cache: RadixCache = cache) -> None:
            found = cache.match(tokens, None, PROBE_TOKENS)
            assert found.num_tokens == PROBE_TOKENS

        def miss(tokens: bytes, cache: RadixCache = cache) -> None:
            assert not cache.match(tokens, None, PROBE_TOKENS).num_tokens

        hits = timed(repeats, lambda probes=probes: rng.choice(probes), hit)
        misses = timed(repeats, lambda: rng.randbytes(4 * PROBE_TOKENS), miss)
        evictions = timed(min(repeats, 1000), lambda: 1, cache.evict)
        medians.append(statistics.median(hits))
        yield (f"{num_tokens:>13,} {_us(hits, 50):>10} us {_us(hits, 99):>7} {_us(misses, 50):>9}"
               f" {_us(evictions, 50):>13}")  # fmt: skip
    yield f"match at {GROWTH[-1]:,} / at {GROWTH[0]:,} other tokens: {medians[-1] / medians[0]:.2f}"


def _us(nanoseconds: Sequence[int], percent: int) -> str:
    place = min(len(nanoseconds) - 1, len(nanoseconds) * percent // 100)
    return f"{sorted(nanoseconds)[place] / 1000:.1f}"


def _mean_us(nanoseconds: Sequence[int]) -> float:
    return statistics.fmean(nanoseconds) / 1000


HEADER = (f"{'tree':<15} {'mean us':>9} {'p50':>9} {'p99':>9} | {'match':>9} {'insert':>9} "
          f"{'evict':>9} | hit rate")  # fmt: skip


def cost_row(name: str, costs: Costs) -> str:
    total = costs.total
    return (
        f"{name:<15} {_mean_us(total):>9.1f} {_us(total, 50):>9} {_us(total, 99):>9} |"
        f" {_mean_us(costs.match):>9.1f} {_mean_us(costs.insert):>9.1f}"
        f" {_mean_us(costs.evict):>9.1f} | {costs.hit_rate:.1%}"
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
        alike = [sum(pair) for pair in zip(costs.match, costs.insert, strict=True)]
        mine = [sum(pair) for pair in zip(ours.match, ours.insert, strict=True)]
        yield (f"{name} / treadle: {_mean_us(costs.total) / _mean_us(ours.total):.0f} x in all, "
               f"{_mean_us(alike) / _mean_us(mine):.0f} x without eviction")  # fmt: skip


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
