from __future__ import annotations

import itertools
import random

import pytest

from treadle.perf import radix_bench
from treadle.perf.plain_trees import DictPerNode, DictPerToken
from treadle.perf.radix_bench import Radix, Replay, trace


def test_trace_has_conversations_of_2k_to_8k_tokens_that_share_prefixes() -> None:
    turns = list(trace(300, conversations=8, seed=random.randrange(10**6)))
    assert all(2000 <= len(tokens) // 4 <= 8000 for tokens, _ in turns)
    assert all(50 <= num_output < 400 for _, num_output in turns)
    starts = {tokens[: 4 * 400] for tokens, _ in turns}
    assert len(starts) <= radix_bench.SYSTEM_PROMPTS
    grown = [
        any(later.startswith(tokens) for later, _ in turns[place + 1 :])
        for place, (tokens, _) in enumerate(turns[:200])
    ]
    assert sum(grown) > 150


def test_all_trees_find_the_same_prefixes_when_nothing_is_evicted() -> None:
    seed = random.randrange(10**6)
    costs = [
        Replay(tree, 200_000).run(trace(25, 4, seed))
        for tree in (Radix(), DictPerNode(), DictPerToken())
    ]
    assert costs[0].num_cached_tokens > 0
    assert len({c.num_cached_tokens for c in costs}) == 1
    assert all(len(c.match) == len(c.insert) == len(c.evict) == 25 for c in costs)


def test_replay_loses_no_page_while_it_evicts() -> None:
    tree = Radix()
    num_pages = 150_000
    replay = Replay(tree, num_pages)
    replay.run(trace(120, 40, random.randrange(10**6)))
    cache = tree.cache
    cache.check_integrity()
    assert cache.protected_pages == 0
    assert len(replay.free) < num_pages / 2, "nothing had to be evicted"
    assert sorted(itertools.chain(replay.free, cache.pages())) == list(range(num_pages))


def test_bench_prints_a_row_for_every_tree_and_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radix_bench, "GROWTH", (1_000, 20_000))
    arguments = ["--requests", "20", "--slice", "10", "--repeats", "3"]
    assert radix_bench.main([*arguments, "--slice-cached-tokens", "60000"]) == 0
    text = capsys.readouterr().out
    for word in (
        "treadle",
        "dict per node / treadle",
        "dict per token / treadle",
        "20,000 / 1,000",
    ):
        assert word in text
