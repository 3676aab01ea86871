from __future__ import annotations

import random

import pytest

from treadle.engine.page_pool import OutOfPages, PagePool
from treadle.graphs.step import KvGroup


def pool(pages: int = 8, page_size: int = 4) -> PagePool:
    return PagePool(KvGroup("full", page_size, pages, 64))


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pool().pages_for(tokens) == pages


def test_allocate_gives_distinct_pages_until_none_is_left() -> None:
    p = pool()
    taken = p.allocate(5) + p.allocate(3)
    assert sorted(taken) == list(range(8))
    with pytest.raises(OutOfPages):
        p.allocate(1)
    p.check_integrity(taken)


def test_failed_allocation_takes_nothing() -> None:
    p = pool()
    with pytest.raises(OutOfPages):
        p.allocate(9)
    assert p.num_free == 8
    p.check_integrity()


def test_release_needs_every_reference_to_go() -> None:
    p = pool()
    (page,) = p.allocate(1)
    p.retain([page])
    p.release([page], last_step=1)
    assert p.num_free == 7
    p.release([page], last_step=1)
    assert p.num_free == 8
    with pytest.raises(AssertionError, match="twice"):
        p.release([page], last_step=1)


def test_released_page_is_parked_until_its_fences_lift() -> None:
    p = pool(pages=1)
    (page,) = p.allocate(1)
    first, second = p.fence([page]), p.fence([page])
    p.release([page], last_step=3)
    assert p.num_free == 0
    p.check_integrity()
    p.lift(first)
    assert p.num_free == 0
    p.lift(second)
    assert list(p.allocate(1)) == [page]


def test_fence_on_a_held_page_does_not_free_it() -> None:
    p = pool(pages=1)
    (page,) = p.allocate(1)
    p.lift(p.fence([page]))
    assert p.num_free == 0
    p.check_integrity([page])


def test_outside_user_gets_only_pages_past_their_last_step() -> None:
    p = pool(pages=3)
    taken = p.allocate(3)
    p.release(taken[:1], last_step=5)
    p.release(taken[1:2], last_step=7)
    with pytest.raises(OutOfPages):
        p.allocate_fenced(2, completed_step=5)
    pages, fence = p.allocate_fenced(1, completed_step=5)
    assert pages == taken[:1]
    p.release(pages, last_step=5)
    assert p.num_free == 1, "its fence still stands"
    p.lift(fence)
    assert p.num_free == 2


def test_step_may_take_a_page_whose_last_step_still_runs() -> None:
    p = pool(pages=1)
    taken = p.allocate(1)
    p.release(taken, last_step=9)
    assert p.allocate(1) == taken


def test_integrity_check_finds_a_lost_reference() -> None:
    p = pool()
    taken = p.allocate(2)
    with pytest.raises(AssertionError, match="references differ"):
        p.check_integrity(taken[:1])


def test_random_use_keeps_every_page_accounted_for() -> None:
    rng = random.Random(7)
    p = pool(pages=32)
    held: list[int] = []
    fences = []
    for step in range(2000):
        choice = rng.random()
        if choice < 0.4 and p.num_free:
            held += p.allocate(rng.randint(1, p.num_free))
        elif choice < 0.7 and held:
            p.release([held.pop(rng.randrange(len(held)))], step)
        elif choice < 0.85 and held:
            fences.append(p.fence([rng.choice(held)]))
        elif fences:
            p.lift(fences.pop(rng.randrange(len(fences))))
        p.check_integrity(held)
