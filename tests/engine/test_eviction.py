from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from treadle.engine.errors import ConfigError
from treadle.engine.eviction import (
    HEAP_SLACK,
    POLICY_NAMES,
    EvictionPolicy,
    EvictionQueue,
    NodeFacts,
    make_policy,
)


@dataclass(eq=False)
class Facts:
    last_access: int = 0
    created: int = 0
    hits: int = 1
    priority: int = 0
    start: int = 0
    end: int = 16
    reach: int = 16
    page_size: int = 4
    stamp: int = 0


def random_facts(rng: random.Random) -> Facts:
    start = 4 * rng.randrange(8)
    end = start + 4 * rng.randrange(1, 8)
    return Facts(
        last_access=rng.randrange(1000), created=rng.randrange(1000), hits=rng.randrange(1, 4),
        priority=rng.randrange(-2, 3), start=start, end=end, reach=end + rng.randrange(20),
    )  # fmt: skip


def drain(queue: EvictionQueue[Facts]) -> list[Facts]:
    taken = []
    while (node := queue.pop()) is not None:
        taken.append(node)
    return taken


ORDERS: dict[str, Callable[[Facts], tuple[int, ...]]] = {
    "lru": lambda n: (n.last_access,),
    "lfu": lambda n: (n.hits, n.last_access),
    "slru": lambda n: (n.hits >= 2, n.last_access),
    "tlru": lambda n: (n.end - 4 < n.reach + 5 - 12, n.last_access),
    "priority": lambda n: (n.priority, n.last_access),
    "fifo": lambda n: (n.created,),
    "mru": lambda n: (-n.last_access,),
    "filo": lambda n: (-n.created,),
}


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_queue_gives_nodes_in_the_policys_order(name: str) -> None:
    rng = random.Random()
    config = {"threshold": 12, "next_prompt_estimate": 5} if name == "tlru" else {}
    queue: EvictionQueue[Facts] = EvictionQueue(make_policy(name, config))
    nodes = [random_facts(rng) for _ in range(200)]
    for node in nodes:
        queue.put(node)
    assert [ORDERS[name](n) for n in drain(queue)] == sorted(ORDERS[name](n) for n in nodes)


def test_policy_names_are_those_of_the_command_line() -> None:
    assert set(POLICY_NAMES) == set(ORDERS)
    assert all(make_policy(name, {}).name == name for name in POLICY_NAMES)


def test_slru_threshold_comes_from_the_config() -> None:
    used = Facts(hits=4)
    assert make_policy("slru", {}).key(used) > make_policy("slru", {"protected_threshold": 5}).key(
        used
    )


@pytest.mark.parametrize(
    ("reach", "end", "spare"),
    [
        (32, 32, 8),  # 32 + 6 - 16 = 22 tokens stay: two whole pages are past them
        (32, 24, 24),  # trimmed to the budget's page: lru, all of it may go
        (30, 32, 12),  # 20 stay
        (10, 32, 32),  # a short conversation is spare as a whole
        (90, 32, 32),  # nothing is spare: lru, all of it may go
    ],
)
def test_tlru_spares_whole_pages_past_the_budget(reach: int, end: int, spare: int) -> None:
    policy = make_policy("tlru", {"threshold": 16, "next_prompt_estimate": 6})
    node = Facts(end=end, reach=reach, last_access=7)
    assert policy.spare(node) == spare
    is_past = reach + 6 - 16 <= end - 4
    assert policy.key(node) == (-1 if is_past else 0, 7)


def test_tlru_spare_stays_within_the_node() -> None:
    policy = make_policy("tlru", {"threshold": 100})
    assert policy.spare(Facts(start=12, end=20, reach=20)) == 8


def test_tlru_without_config_is_lru() -> None:
    rng = random.Random()
    nodes = [random_facts(rng) for _ in range(50)]
    tlru, lru = make_policy("tlru", {}), make_policy("lru", {})
    assert sorted(nodes, key=tlru.key) == sorted(nodes, key=lru.key)
    assert all(tlru.spare(n) == n.end - n.start for n in nodes)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("random", {}, ("--radix-eviction-policy", "lru", "filo")),
        ("lru", {"threshold": 1}, ("--radix-eviction-policy-config", "no keys", "'threshold'")),
        ("slru", {"threshold": 1}, ("protected_threshold", "'threshold'")),
        ("slru", {"protected_threshold": 0}, ("protected_threshold", "at least 1", "0")),
        ("slru", {"protected_threshold": True}, ("protected_threshold", "True")),
        ("slru", {"protected_threshold": 2.5}, ("integer", "2.5")),
        ("tlru", {"threshold": -1}, ("threshold", "at least 0", "-1")),
        ("tlru", {"next_prompt_estimate": "9"}, ("next_prompt_estimate", "'9'")),
    ],
)
def test_bad_settings_are_named(
    name: str, config: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_policy(name, config)
    assert all(word in str(caught.value) for word in words), caught.value


def test_queue_moves_a_node_that_is_put_again() -> None:
    queue: EvictionQueue[Facts] = EvictionQueue(make_policy("lru", {}))
    first, second = Facts(last_access=1), Facts(last_access=2)
    queue.put(first)
    queue.put(second)
    first.last_access = 3
    queue.put(first)
    queue.check_integrity([first, second])
    assert drain(queue) == [second, first]


def test_queue_forgets_a_discarded_node_until_it_returns() -> None:
    queue: EvictionQueue[Facts] = EvictionQueue(make_policy("lru", {}))
    nodes = [Facts(last_access=n) for n in range(3)]
    for node in nodes:
        queue.put(node)
    queue.discard(nodes[0])
    queue.discard(nodes[0])
    queue.check_integrity(nodes[1:])
    assert queue.pop() is nodes[1]
    queue.put(nodes[0])
    assert drain(queue) == [nodes[0], nodes[2]]
    queue.check_integrity([])


def test_queue_drops_stale_entries_that_outnumber_valid_ones() -> None:
    rng = random.Random()
    queue: EvictionQueue[Facts] = EvictionQueue(make_policy("lru", {}))
    nodes = [Facts() for _ in range(100)]
    for now in range(20_000):
        node = rng.choice(nodes)
        node.last_access = now
        queue.put(node)
        assert len(queue._heap) <= 2 * 100 + HEAP_SLACK
    queue.check_integrity(node for node in nodes if node.stamp)
    assert drain(queue) == sorted((n for n in nodes if n.last_access), key=lambda n: n.last_access)


def test_queue_never_asks_for_keys_of_all_nodes() -> None:
    asked = 0

    def key(node: NodeFacts) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        return (node.last_access,)

    queue: EvictionQueue[Facts] = EvictionQueue(EvictionPolicy("counted", key))
    for now in range(5000):
        queue.put(Facts(last_access=now))
    asked = 0
    for now in range(5000, 5100):
        node = queue.pop()
        assert node is not None
        node.last_access = now
        queue.put(node)
    assert asked == 100


@pytest.mark.parametrize("wrong", ["missing", "extra", "moved", "count"])
def test_queue_integrity_check_finds(wrong: str) -> None:
    queue: EvictionQueue[Facts] = EvictionQueue(make_policy("lru", {}))
    nodes = [Facts(last_access=n) for n in range(3)]
    for node in nodes:
        queue.put(node)
    queue.check_integrity(nodes)
    if wrong == "missing":
        nodes.append(Facts())
    elif wrong == "extra":
        nodes.pop()
    elif wrong == "moved":
        nodes[1].last_access = 9
    else:
        queue._num_valid += 1
    with pytest.raises(AssertionError):
        queue.check_integrity(nodes)
