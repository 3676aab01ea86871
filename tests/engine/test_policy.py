from __future__ import annotations

import random
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.engine.config import ScheduleConfig
from treadle.engine.eviction import make_policy
from treadle.engine.policy import LPM_MAX_WAITING, SHARED_TOKENS, QueuePolicy, depth_first
from treadle.engine.radix_cache import RadixCache
from treadle.engine.request import Request
from treadle.engine.sampling_params import SamplingParams

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority", "routing-key")
Tokens = Sequence[int]


@dataclass
class Cache:
    """Prefixes that are cached, and how often it was asked."""

    prefixes: list[tuple[Hashable, Tokens]] = field(default_factory=list)
    page_size: int = 1
    num_nodes: int = 0
    evictable_pages: int = 0
    protected_pages: int = 0
    num_asked: int = 0

    def add(self, tokens: Tokens, namespace: Hashable = None) -> None:
        self.prefixes.append((namespace, tuple(tokens)))
        self.num_nodes += 1

    def peek(self, tokens: bytes, namespace: Hashable, limit: int) -> int:
        self.num_asked += 1
        ids = array("i", tokens)[:limit]
        return max((self._shared(ids, p) for n, p in self.prefixes if n == namespace), default=0)

    def _shared(self, ids: Tokens, prefix: Tokens) -> int:
        count = 0
        while count < min(len(ids), len(prefix)) and ids[count] == prefix[count]:
            count += 1
        return count // self.page_size * self.page_size


class Arrivals:
    """Makes requests that arrive one after the other."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, tokens: Tokens = (1, 2, 3), new: int = 10, **options: Any) -> Request:
        self._count += 1
        request = Request(
            request_id=str(self._count),
            index=0,
            token_ids=array("i", tokens),
            max_len=len(tokens) + new,
            params=SamplingParams(),
            seed=0,
            stop_ids=frozenset(),
            text=None,
            stream_interval=1,
            sink=lambda delta: None,
            **options,
        )
        request.arrival_order = self._count
        return request


@pytest.fixture
def arrive() -> Arrivals:
    return Arrivals()


def policy(name: str = "fcfs", cache: Any = None, **settings_: Any) -> QueuePolicy:
    config = ScheduleConfig(schedule_policy=name, **settings_)
    return QueuePolicy(config, cache, random.Random(3))


def shuffled(requests: Sequence[Request]) -> list[Request]:
    return random.sample(list(requests), len(requests))


def test_fcfs_is_arrival_order_also_for_retracted_requests(arrive: Arrivals) -> None:
    requests = [arrive() for _ in range(30)]
    chosen = policy()
    assert chosen.is_arrival_order
    assert chosen.order(shuffled(requests), ()) == requests


def test_lof_puts_the_longest_output_first(arrive: Arrivals) -> None:
    news = [5, 900, 5, 40, 900]
    requests = [arrive(range(random.randint(1, 50)), new) for new in news]
    ordered = policy("lof").order(shuffled(requests), ())
    assert ordered == [requests[i] for i in (1, 4, 3, 0, 2)]


def test_random_is_a_fresh_permutation_each_time(arrive: Arrivals) -> None:
    requests = [arrive() for _ in range(40)]
    chosen = policy("random")
    orders = [chosen.order(requests, ()) for _ in range(3)]
    assert all(set(order) == set(requests) and len(order) == 40 for order in orders)
    assert orders[0] != orders[1] != orders[2] != requests
    assert not chosen.is_arrival_order


def test_routing_keys_that_run_go_first_by_count_and_unknown_last(arrive: Arrivals) -> None:
    running = [arrive(routing_key=key) for key in ("b", "a", "c", "c", None, "z")]
    keys = [None, "new", "a", "c", "b", None, "c", "new"]
    waiting = [arrive(routing_key=key) for key in keys]
    ordered = policy("routing-key").order(shuffled(waiting), running)
    assert [r.routing_key for r in ordered] == ["c", "c", "a", "b", None, "new", None, "new"]
    assert [r.arrival_order for r in ordered[:2]] == sorted(r.arrival_order for r in ordered[:2])


def test_routing_follows_what_runs(arrive: Arrivals) -> None:
    a, b = arrive(routing_key="a"), arrive(routing_key="b")
    chosen = policy("routing-key")
    assert chosen.order([a, b], ()) == [a, b]
    assert chosen.order([a, b], [arrive(routing_key="b")]) == [b, a]
    assert chosen.order([a, b], ()) == [a, b]


PRIORITIES = [None, 3, -1, 3, 50, None]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4, 1, 3, 2, 0, 5]),
        ({"schedule_low_priority_values_first": True}, [2, 1, 3, 4, 0, 5]),
        ({"default_priority_value": 3}, [4, 0, 1, 3, 5, 2]),
        (
            {"default_priority_value": -9, "schedule_low_priority_values_first": True},
            [0, 5, 2, 1, 3, 4],
        ),
    ],
)
@pytest.mark.parametrize("name", ["fcfs", "priority"])
def test_priorities_order_and_missing_ones_go_last(
    arrive: Arrivals, name: str, options: dict[str, Any], expected: list[int]
) -> None:
    waiting = [arrive(priority=value) for value in PRIORITIES]
    chosen = policy(name, enable_priority_scheduling=name == "fcfs", **options)
    assert not chosen.is_arrival_order
    assert chosen.order(shuffled(waiting), ()) == [waiting[i] for i in expected]


def test_priorities_do_not_count_unless_enabled(arrive: Arrivals) -> None:
    waiting = [arrive(priority=value) for value in PRIORITIES]
    chosen = policy()
    assert chosen.order(waiting, ()) == waiting
    assert {chosen.importance(request) for request in waiting} == {0}


def test_importance_compares_as_preemption_needs_it(arrive: Arrivals) -> None:
    chosen = policy(enable_priority_scheduling=True)
    none, low, high, same = (arrive(priority=value) for value in (None, -(2**63), 5, 5))
    assert chosen.importance(high) - chosen.importance(same) == 0  # never beats a threshold
    assert chosen.importance(none) < chosen.importance(low) < chosen.importance(high)
    lowest_first = policy(enable_priority_scheduling=True, schedule_low_priority_values_first=True)
    assert lowest_first.importance(none) < lowest_first.importance(arrive(priority=2**63 - 1))
    assert lowest_first.importance(low) > lowest_first.importance(high)


@pytest.mark.parametrize("name", ["lof", "routing-key", "lpm", "dfs-weight", "random"])
def test_priority_goes_above_every_policy(arrive: Arrivals, name: str) -> None:
    cache = Cache()
    cache.add(range(100))
    # all that a policy likes is with the unimportant ones
    low = [arrive(range(80), 500, routing_key="k", priority=1) for _ in range(3)]
    high = [arrive((9, 9), 1, priority=2) for _ in range(3)]
    chosen = policy(name, cache, enable_priority_scheduling=True)
    ordered = chosen.order(shuffled(low + high), [arrive(routing_key="k")])
    assert set(ordered[:3]) == set(high)


def prompt(*parts: int, length: int = 40) -> list[int]:
    """Each part a run of one token id."""
    return [token for part in parts for token in [part] * length]


def test_lpm_puts_the_longest_cached_prefix_first(arrive: Arrivals) -> None:
    cache = Cache()
    cache.add(prompt(1, 2, 3))
    waiting = [arrive(prompt(*parts)) for parts in ((8,), (1, 9), (1, 2, 3, 4), (7,), (1, 2, 9))]
    ordered = policy("lpm", cache).order(shuffled(waiting), ())
    assert ordered == [waiting[i] for i in (2, 4, 1, 0, 3)]


def test_lpm_is_fcfs_above_its_limit(arrive: Arrivals) -> None:
    cache = Cache()
    cache.add(prompt(1))
    waiting = [arrive([5, 5])] + [arrive(prompt(1, i)) for i in range(LPM_MAX_WAITING - 1)]
    chosen = policy("lpm", cache)
    assert chosen.order(waiting, ())[-1] is waiting[0]
    waiting.append(arrive(prompt(1)))
    asked = cache.num_asked
    assert chosen.order(waiting, ()) == waiting and cache.num_asked == asked


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_without_a_cache_the_cache_aware_policies_are_fcfs(arrive: Arrivals, name: str) -> None:
    waiting = [arrive(prompt(1)) for _ in range(4)]
    chosen = policy(name, None)
    assert chosen.is_arrival_order and chosen.order(shuffled(waiting), ()) == waiting


def test_namespaces_do_not_share(arrive: Arrivals) -> None:
    cache = Cache()
    cache.add(prompt(1, 2), "a")
    waiting = [arrive(prompt(1, 2), namespace=space) for space in (None, "b", "a")]
    ordered = policy("lpm", cache).order(waiting, ())
    assert ordered == [waiting[2], waiting[0], waiting[1]]


@pytest.mark.parametrize("name", ["lpm", "dfs-weight"])
def test_requests_that_share_an_uncached_prefix_let_one_go_ahead(
    arrive: Arrivals, name: str
) -> None:
    cache = Cache()
    a, b, c, d, e = (arrive(prompt(*p)) for p in ((1, 2), (1, 3), (4,), (1, 4), (5,)))
    chosen = policy(name, cache)
    assert chosen.order([a, b, c, d, e], ()) == [a, c, e, b, d]
    cache.add(prompt(1, 2))  # the first one's KV is there: nobody has to wait
    assert chosen.order([b, c, d, e], ()) == [b, d, c, e]


@pytest.mark.parametrize(("page", "shared", "waits"), [
    (1, SHARED_TOKENS - 1, False), (1, SHARED_TOKENS, True), (64, 63, False), (64, 64, True),
    (20, 39, False), (20, 40, True),
])  # fmt: skip
def test_sharing_counts_from_its_threshold_in_whole_pages(
    arrive: Arrivals, page: int, shared: int, waits: bool
) -> None:
    a, b = (arrive([1] * shared + [own] * 30) for own in (2, 3))
    c = arrive([4] * 90)
    ordered = policy("lpm", Cache(page_size=page)).order([a, b, c], ())
    assert ordered == ([a, c, b] if waits else [a, b, c])


def test_a_prompt_that_ends_at_the_threshold_has_nothing_to_wait_for(arrive: Arrivals) -> None:
    a, b, c = arrive([1] * SHARED_TOKENS), arrive([1] * SHARED_TOKENS), arrive([2])
    assert policy("lpm", Cache()).order([a, b, c], ()) == [a, b, c]


@pytest.mark.parametrize(("cached", "waits"), [(SHARED_TOKENS, True), (SHARED_TOKENS + 1, False)])
def test_prefix_cached_beyond_the_threshold_never_waits(
    arrive: Arrivals, cached: int, waits: bool
) -> None:
    cache = Cache()
    cache.add([1] * cached)
    a, b, c = (arrive([token] * 60) for token in (1, 1, 2))
    assert policy("lpm", cache).order([a, b, c], ()) == ([a, c, b] if waits else [a, b, c])


def test_equal_prompts_of_different_namespaces_do_not_wait(arrive: Arrivals) -> None:
    a, b, c = (arrive(prompt(1), namespace=space) for space in ("x", "y", "x"))
    d = arrive(prompt(2))
    assert policy("lpm", Cache()).order([a, b, c, d], ()) == [a, b, d, c]


def test_the_last_token_of_a_cached_prompt_does_not_count(arrive: Arrivals) -> None:
    cache = Cache()
    cache.add([1] * 50)
    a, b, c = arrive([1] * 48 + [2] * 9), arrive([1] * 49 + [2] * 9), arrive([1] * 50)
    assert policy("lpm", cache).order([a, b, c], ()) == [b, c, a]


def test_the_most_important_of_those_that_share_goes_ahead(arrive: Arrivals) -> None:
    """Else an important request would wait for an unimportant one."""
    low, high = arrive(prompt(1, 2), priority=0), arrive(prompt(1, 3), priority=9)
    middle, also_high = arrive(prompt(4), priority=5), arrive(prompt(1, 4), priority=9)
    chosen = policy("lpm", Cache(), enable_priority_scheduling=True)
    ordered = chosen.order([low, middle, high, also_high], ())
    assert ordered == [high, also_high, middle, low]


def test_dfs_weight_visits_heavy_subtrees_first_and_children_before_parents(
    arrive: Arrivals,
) -> None:
    cache = Cache()
    for parts in ((1, 2, 3), (1, 2, 4), (1, 5), (6,)):
        cache.add(prompt(*parts))
    queue = {
        name: arrive(prompt(*parts) + [99] * 5)
        for name, parts in {
            "6": (6,), "1": (1,), "1 5": (1, 5), "none": (7,), "1 2 4": (1, 2, 4),
            "1 2": (1, 2), "1 2 3": (1, 2, 3), "1 2 3 b": (1, 2, 3), "6 b": (6,),
        }.items()
    }  # fmt: skip
    ordered = policy("dfs-weight", cache).order(shuffled(list(queue.values())), ())
    names = {request: name for name, request in queue.items()}
    assert [names[r] for r in ordered] == [
        "1 2 3", "1 2 3 b", "1 2 4", "1 2", "1 5", "1", "6", "6 b", "none",
    ]  # fmt: skip


def brute_depth_first(items: list[tuple[Tokens, Request]], page: int) -> list[Request]:
    """Recursion over a tree of single pages."""
    ending = [request for prefix, request in items if not prefix]
    edges: dict[Tokens, list[tuple[Tokens, Request]]] = {}
    for prefix, request in items:
        if prefix:
            edges.setdefault(tuple(prefix[:page]), []).append((prefix[page:], request))
    below = sorted(edges.values(), key=lambda g: (-len(g), min(r.arrival_order for _, r in g)))
    return [r for group in below for r in brute_depth_first(group, page)] + ending


@settings(max_examples=150)
@given(st.data(), st.integers(1, 3))
def test_depth_first_equals_recursion(data: st.DataObject, page: int) -> None:
    arrive = Arrivals()
    token_lists = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12),
                                     min_size=1, max_size=12))  # fmt: skip
    lengths = {arrive(tokens): len(tokens) // page * page for tokens in token_lists}
    expected = brute_depth_first([(tuple(r.token_ids[:n]), r) for r, n in lengths.items()], page)
    assert depth_first(lengths, page) == expected


def test_answers_are_remembered_until_something_changes(arrive: Arrivals) -> None:
    cache = Cache()
    cache.add(prompt(1))
    waiting = [arrive(prompt(i, 5)) for i in range(20)]
    chosen = policy("lpm", cache)
    first = chosen.order(waiting, ())
    assert cache.num_asked == 20
    first.clear()
    assert len(chosen.order(waiting, ())) == 20 and cache.num_asked == 20
    waiting.append(arrive(prompt(1, 6)))
    chosen.order(waiting, ())
    assert cache.num_asked == 21  # only the new one
    cache.add(prompt(2))
    chosen.order(waiting, ())
    assert cache.num_asked == 42


def test_a_new_tree_is_asked_instead_of_the_old(arrive: Arrivals) -> None:
    old, new = Cache(), Cache()
    old.add(prompt(1))
    new.add(prompt(2))  # as many nodes and pages as the old one
    a, b = arrive(prompt(1, 9)), arrive(prompt(2, 9))
    chosen = policy("lpm", old)
    assert chosen.order([a, b], ()) == [a, b]
    chosen.use_cache(new)
    assert chosen.order([a, b], ()) == [b, a]


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(POLICIES),
    uses_priority=st.booleans(),
    low_first=st.booleans(),
    page=st.sampled_from([1, 16]),
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=4),
            st.none() | st.integers(-3, 3),
            st.sampled_from([None, "a", "b"]),
        ),
        max_size=25,
    ),
    cached=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
)
def test_every_order_is_a_permutation_by_importance_over_the_real_tree(
    name: str,
    uses_priority: bool,
    low_first: bool,
    page: int,
    rows: list[tuple[list[int], int | None, str | None]],
    cached: list[list[int]],
) -> None:
    arrive = Arrivals()
    tree = RadixCache(page, make_policy("lru", {}))
    for parts in cached:
        tokens = array("i", prompt(*parts, length=16)).tobytes()
        tree.insert(tokens, array("i", range(len(tokens) // 4 // page)), None)
    waiting = [
        arrive([*prompt(*parts, length=16), 7], priority=priority, routing_key=key)
        for parts, priority, key in rows
    ]
    chosen = policy(
        name, tree, enable_priority_scheduling=uses_priority,
        schedule_low_priority_values_first=low_first,
    )  # fmt: skip
    given_ = shuffled(waiting)
    before = given_.copy()
    ordered = chosen.order(given_, waiting[:3])
    assert given_ == before and sorted(ordered, key=lambda r: r.arrival_order) == waiting
    ranks = [chosen.importance(request) for request in ordered]
    assert ranks == sorted(ranks, reverse=True)
    if chosen.is_arrival_order:
        assert ordered == waiting
