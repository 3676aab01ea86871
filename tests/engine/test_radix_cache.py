from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence

import pytest

from treadle.engine.eviction import EvictionPolicy, NodeFacts, make_policy
from treadle.engine.radix_cache import Node, RadixCache

SPACE = ("adapter", 1, None)  # a namespace


def encode(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(-(2**31), 2**31) for _ in range(length)]


def make_cache(page_size: int = 1, policy: str = "lru") -> RadixCache:
    return RadixCache(page_size, make_policy(policy, {}))


def put(cache: RadixCache, tokens: Sequence[int], first_page: int) -> Node:
    """Inserts a whole sequence with consecutive new page ids."""
    pages = range(first_page, first_page + len(tokens) // cache.page_size)
    return cache.insert(encode(tokens), pages, SPACE).node


def cached(cache: RadixCache, tokens: Sequence[int]) -> list[int]:
    return cache.match(encode(tokens), SPACE, len(tokens)).pages.tolist()


def test_match_in_an_empty_tree_is_the_root() -> None:
    cache = make_cache()
    found = cache.match(encode([1, 2, 3]), SPACE, 3)
    assert (found.num_tokens, found.pages.tolist(), found.node.parent) == (0, [], None)
    cache.lock(found.node)
    cache.check_integrity()
    cache.unlock(found.node)
    assert cache.num_nodes == cache.evictable_pages == cache.protected_pages == 0
    cache.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "limit", "expected"),
    [(12, 12, 12), (12, 11, 8), (11, 12, 8), (20, 20, 12), (3, 3, 0), (12, 0, 0), (12, -1, 0)],
)
def test_match_gives_whole_pages_within_the_limit(
    num_tokens: int, limit: int, expected: int
) -> None:
    cache = make_cache(page_size=4)
    tokens = random_tokens(random.Random(), 20)
    put(cache, tokens[:12], 70)
    prefix = encode(tokens[:num_tokens])
    assert cache.peek(prefix, SPACE, limit) == expected
    found = cache.match(prefix, SPACE, limit)
    assert found.num_tokens == found.node.end == expected
    assert found.pages.tolist() == list(range(70, 70 + expected // 4))
    cache.check_integrity()


def test_match_finds_the_differing_page_of_a_long_node() -> None:
    rng = random.Random()
    for _ in range(200):
        page_size, num_pages = rng.randrange(1, 20), rng.randrange(1, 300)
        cache = make_cache(page_size)
        tokens = random_tokens(rng, page_size * num_pages)
        put(cache, tokens, 0)
        place = rng.randrange(len(tokens))
        other = list(tokens)
        other[place] ^= 1
        assert cached(cache, other) == list(range(place // page_size))
        assert cached(cache, tokens) == list(range(num_pages))
        cache.check_integrity()


def test_match_splits_a_node_it_ends_in() -> None:
    cache = make_cache(page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6], 10)
    found = cache.match(encode([1, 2, 3, 4, 9, 9]), SPACE, 6)
    assert found.pages.tolist() == [10, 11]
    assert cache.num_nodes == 2
    assert cached(cache, [1, 2, 3, 4, 5, 6]) == [10, 11, 12]
    cache.check_integrity()


def test_split_leaves_both_halves_the_facts_of_the_whole() -> None:
    cache = make_cache(page_size=2)
    tokens = encode([1, 2, 3, 4, 5, 6])
    lower = cache.insert(tokens, [0, 1, 2], SPACE, priority=7).node
    cache.count_hit(lower)
    cache.count_hit(lower)
    created = lower.created
    upper = cache.match(tokens, SPACE, 4).node
    for node in (upper, lower):
        assert (node.hits, node.priority, node.created, node.reach) == (3, 7, created, 6)
    assert (upper.start, upper.end, lower.start, lower.end) == (0, 4, 4, 6)
    assert upper.last_access > lower.last_access


def test_split_gives_the_rest_of_the_node_its_new_place_in_the_queue() -> None:
    cache = RadixCache(1, EvictionPolicy("deepest start", lambda node: (-node.start,)))
    put(cache, [1, 2, 3], 10)
    put(cache, [5, 6], 20)
    cached(cache, [1, 2])
    cache.check_integrity()
    assert cache.evict(1).tolist() == [12]


def test_insert_gives_its_priority_to_what_was_there() -> None:
    cache = make_cache(policy="priority")
    cache.insert(encode([1, 2]), [11, 12], SPACE, priority=1)
    cache.insert(encode([3]), [13], SPACE, priority=2)
    cache.insert(encode([1, 2]), [21, 22], SPACE, priority=3)
    cache.check_integrity()
    assert cache.evict(1).tolist() == [13]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_insert_counts_as_use_of_what_was_there(policy: str) -> None:
    cache = make_cache(policy=policy)
    put(cache, [1, 2], 10)
    put(cache, [3, 4], 20)
    put(cache, [1, 2], 30)
    cache.check_integrity()
    assert sorted(cache.evict(2)) == [20, 21]


def test_peek_changes_nothing() -> None:
    cache = make_cache()
    put(cache, [1, 2, 3], 0)
    put(cache, [4, 5], 10)
    assert cache.peek(encode([1, 2, 9]), SPACE, 3) == 2
    assert cache.num_nodes == 2
    assert sorted(cache.evict(3)) == [0, 1, 2], "the peek counted as a use"


def test_namespaces_never_share() -> None:
    cache = make_cache(page_size=2)
    tokens = encode([1, 2, 3, 4])
    for number, space in enumerate(("a", "b", None, ("a", 2))):
        assert cache.peek(tokens, space, 4) == 0
        assert cache.insert(tokens, [number * 2, number * 2 + 1], space).num_present_tokens == 0
    for number, space in enumerate(("a", "b", None, ("a", 2))):
        assert cache.match(tokens, space, 4).pages.tolist() == [number * 2, number * 2 + 1]
    cache.check_integrity()


def test_insert_takes_only_pages_the_tree_lacks() -> None:
    cache = make_cache(page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6], 10)
    result = cache.insert(encode([1, 2, 3, 4, 7, 8, 9, 9]), [20, 21, 22, 23], SPACE)
    assert (result.num_present_tokens, result.pages.tolist()) == (4, [10, 11])
    assert result.node.end == 8
    assert sorted(cache.pages()) == [10, 11, 12, 22, 23]
    assert cached(cache, [1, 2, 3, 4, 7, 8, 9, 9]) == [10, 11, 22, 23]
    cache.check_integrity()


def test_insert_of_a_present_prefix_ends_inside_a_node() -> None:
    cache = make_cache()
    whole = put(cache, [1, 2, 3], 10)
    result = cache.insert(encode([1, 2]), [20, 21], SPACE)
    assert (result.num_present_tokens, result.pages.tolist()) == (2, [10, 11])
    assert result.node is whole.parent
    assert list(cache.insert(b"", [], SPACE).pages) == []
    cache.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_insert_in_chunks_gives_the_same_tree_as_at_once(page_size: int) -> None:
    rng = random.Random()
    cache = make_cache(page_size)
    tokens = random_tokens(rng, 40 * page_size)
    shared = rng.randrange(40)
    put(cache, tokens[: shared * page_size], 1000)
    node: Node | None = None
    done = 0
    while done < 40:
        step = min(rng.randrange(1, 8), 40 - done)
        part = tokens[done * page_size : (done + step) * page_size]
        result = cache.insert(encode(part), range(done, done + step), SPACE, after=node)
        num_present = min(max(shared - done, 0), step)
        assert result.num_present_tokens == num_present * page_size
        assert result.pages.tolist() == list(range(1000 + done, 1000 + done + num_present))
        cache.lock(result.node)
        if node is not None:
            cache.unlock(node)
        node, done = result.node, done + step
        assert node.end == done * page_size
        assert (cache.protected_pages, cache.evictable_pages) == (done, max(shared - done, 0))
        cache.check_integrity()
    assert cached(cache, tokens) == [*range(1000, 1000 + shared), *range(shared, 40)]


def test_insert_after_an_unlocked_node_is_refused() -> None:
    cache = make_cache()
    node = put(cache, [1, 2], 0)
    with pytest.raises(AssertionError, match="not locked"):
        cache.insert(encode([3]), [2], SPACE, after=node)


def test_insert_of_a_partial_page_is_refused() -> None:
    with pytest.raises(AssertionError, match="fill"):
        make_cache(page_size=2).insert(encode([1, 2, 3]), [0], SPACE)


def test_locked_path_is_never_evicted() -> None:
    cache = make_cache()
    put(cache, [1, 2, 3, 4], 0)
    put(cache, [1, 2, 8, 9], 10)
    node = cache.match(encode([1, 2, 3, 4]), SPACE, 3).node
    cache.lock(node)
    cache.lock(node)
    assert (cache.protected_pages, cache.evictable_pages) == (3, 3)
    assert sorted(cache.evict(100)) == [3, 12, 13]
    cache.unlock(node)
    assert cache.clear().tolist() == []
    cache.check_integrity()
    cache.unlock(node)
    assert sorted(cache.clear()) == [0, 1, 2]
    assert cache.num_nodes == 0
    cache.check_integrity()


def test_lock_holds_through_a_split_and_an_extension() -> None:
    cache = make_cache()
    node = put(cache, [1, 2, 3, 4], 0)
    cache.lock(node)
    put(cache, [1, 2, 7], 10)
    put(cache, [1, 2, 3, 4, 5], 20)
    cache.check_integrity()
    assert sorted(cache.clear()) == [12, 24]
    assert node.end == 4
    assert cached(cache, [1, 2, 3, 4]) == [0, 1, 2, 3]
    cache.unlock(node)
    assert sorted(cache.clear()) == [0, 1, 2, 3]


def test_unlock_without_lock_is_refused() -> None:
    cache = make_cache()
    node = put(cache, [1], 0)
    with pytest.raises(AssertionError, match="unlocked"):
        cache.unlock(node)
    with pytest.raises(AssertionError, match="unlocked"):
        make_cache().unlock(make_cache().match(b"", SPACE, 0).node)


def test_lock_of_an_evicted_node_is_refused() -> None:
    cache = make_cache()
    node = put(cache, [1, 2], 0)
    cache.evict(2)
    with pytest.raises(AssertionError, match="evicted"):
        cache.lock(node)


@pytest.mark.parametrize("page_size", [1, 4])
def test_evict_cuts_the_last_leaf_and_keeps_its_front(page_size: int) -> None:
    cache = make_cache(page_size)
    tokens = random_tokens(random.Random(), 6 * page_size)
    put(cache, tokens, 10)
    assert sorted(cache.evict(2)) == [14, 15]
    assert cached(cache, tokens) == [10, 11, 12, 13]
    cache.check_integrity()
    assert sorted(cache.evict(3)) == [11, 12, 13]
    put(cache, tokens, 20)
    assert cached(cache, tokens) == [10, 21, 22, 23, 24, 25]
    cache.check_integrity()


def test_evict_goes_on_to_the_parent_of_the_last_child() -> None:
    cache = make_cache()
    put(cache, [1, 2, 3], 0)
    put(cache, [1, 2, 4], 10)
    assert sorted(cache.evict(3)) == [1, 2, 12]
    assert cached(cache, [1, 2, 3]) == [0]
    cache.check_integrity()


def test_evict_nothing_or_more_than_there_is() -> None:
    cache = make_cache()
    put(cache, [1, 2], 0)
    assert cache.evict(0).tolist() == []
    assert cache.evict(-1).tolist() == []
    assert sorted(cache.evict(5)) == [0, 1]
    assert cache.evict(5).tolist() == []


def test_last_use_lasts_until_the_lock_ends() -> None:
    cache = make_cache()
    early = put(cache, [1], 1)
    cache.lock(early)
    put(cache, [2], 2)
    cache.unlock(early)
    assert cache.evict(1).tolist() == [2]


def test_hits_count_admitted_requests_along_the_path() -> None:
    cache = make_cache(policy="lfu")
    put(cache, [1, 2], 10)
    put(cache, [3], 30)
    parent = cache.match(encode([1]), SPACE, 1).node
    node = cache.match(encode([1, 2]), SPACE, 2).node
    cache.count_hit(node)
    cache.match(encode([3]), SPACE, 1)
    cache.match(encode([3]), SPACE, 1)
    cache.check_integrity()
    assert cache.evict(1).tolist() == [30]
    assert cached(cache, [1, 2]) == [10, 11]
    assert (node.parent, parent.hits, node.hits) == (parent, 2, 2)


def test_priority_of_a_path_is_its_highest() -> None:
    cache = make_cache(policy="priority")
    cache.insert(encode([1, 2]), [11, 12], SPACE, priority=-3)
    cache.insert(encode([5]), [15], SPACE, priority=-1)
    cache.insert(encode([1, 3]), [21, 23], SPACE, priority=4)
    assert cache.evict(1).tolist() == [12]
    assert cache.evict(1).tolist() == [15]
    assert sorted(cache.evict(2)) == [11, 23]


def test_tlru_cuts_a_long_conversation_to_its_budget_first() -> None:
    cache = RadixCache(2, make_policy("tlru", {"threshold": 7, "next_prompt_estimate": 2}))
    put(cache, [9, 9, 9, 9], 0)  # 4 tokens: all within reach of the budget
    put(cache, list(range(20)), 10)  # 20 + 2 - 7 = 15 tokens stay, which take 8 pages
    put(cache, [7] * 16, 30)
    cached(cache, [9, 9, 9, 9])
    assert sorted(cache.evict(2)) == [18, 19]
    assert sorted(cache.evict(2)) == [36, 37]
    assert sorted(cache.evict(2)) == [0, 1]
    assert sorted(cache.evict(3)) == [15, 16, 17]
    cache.check_integrity()


def test_deep_path_needs_no_recursion() -> None:
    cache = make_cache()
    depth = 20_000
    node: Node | None = None
    for token in range(depth):
        result = cache.insert(encode([token]), [token], SPACE, after=node)
        cache.lock(result.node)
        if node is not None:
            cache.unlock(node)
        node = result.node
    assert node is not None
    assert cache.num_nodes == cache.protected_pages == depth
    cache.unlock(node)
    cache.check_integrity()
    assert cached(cache, range(depth)) == list(range(depth))
    assert sorted(cache.evict(depth)) == list(range(depth))


def test_eviction_asks_for_keys_of_few_nodes_however_many_there_are() -> None:
    asked = 0

    def key(node: NodeFacts) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        return (node.last_access,)

    cache = RadixCache(1, EvictionPolicy("counted", key))
    for number in range(5000):
        put(cache, [number], number)
    asked = 0
    assert cache.evict(100).tolist() == list(range(100))
    assert asked == 0
    cached(cache, [200])
    assert asked == 1


def test_renewed_tree_is_empty_and_of_the_same_kind() -> None:
    cache = make_cache(4, "filo")
    put(cache, [1, 2, 3, 4], 0)
    fresh = cache.renewed()
    assert (fresh.page_size, fresh.policy, fresh.num_nodes) == (4, cache.policy, 0)
    assert cache.num_nodes == 1


def _corrupt_child_key(cache: RadixCache, node: Node) -> None:
    assert node.parent is not None
    node.parent.children[b"else"] = node.parent.children.pop(node.edge)
    node.edge = b"else"


def _corrupt_duplicate(cache: RadixCache, node: Node) -> None:
    assert node.parent is not None
    node.pages[0] = node.parent.pages[0]


def _set(target: str, name: str, change: int) -> Callable[[RadixCache, Node], None]:
    def corrupt(cache: RadixCache, node: Node) -> None:
        owner = cache if target == "cache" else node
        setattr(owner, name, getattr(owner, name) + change)

    return corrupt


CORRUPTIONS: dict[str, Callable[[RadixCache, Node], None]] = {
    "evictable": _set("cache", "_evictable_pages", 1),
    "protected": _set("cache", "_protected_pages", -1),
    "nodes": _set("cache", "_num_nodes", 1),
    "locks": _set("cache", "_num_locks", 1),
    "hold": _set("node", "holds", 1),
    "lost hold": lambda cache, node: setattr(node.parent, "holds", 0),
    "end": _set("node", "end", 2),
    "reach": _set("node", "reach", -1),
    "key": _corrupt_child_key,
    "filed": lambda cache, node: setattr(node, "edge", b"else"),
    "duplicate": _corrupt_duplicate,
    "pages": lambda cache, node: node.pages.append(99),
    "parent": lambda cache, node: setattr(node, "parent", None),
    "queue": lambda cache, node: cache._queue.put(node),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_integrity_check_finds_corruption(name: str) -> None:
    cache = make_cache(page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6], 0)
    node = cache.match(encode([1, 2, 3, 4]), SPACE, 4).node
    child = cache.insert(encode([1, 2, 3, 4, 7, 7]), [10, 11, 12], SPACE).node
    assert child.parent is node
    cache.lock(child)
    cache.check_integrity()
    CORRUPTIONS[name](cache, child)
    with pytest.raises(AssertionError):
        cache.check_integrity()
