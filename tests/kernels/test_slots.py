"""Slot state against a plain-Python account of it: the host's kernels and torch's operators."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch

from treadle.kernels import rows, slots
from treadle.kernels.slots import HostRows, SlotState, TokenInputs

SLOTS, WIDTH, PAGES = 6, 9, 40


@pytest.fixture(params=["host", "torch"])
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "torch":
        for name in ("_prepare_decode", "_prepare_tokens", "_update_pages", "_sampling_state",
                     "_feed_back"):  # fmt: skip
            monkeypatch.setattr(slots, name, None)
        for name in ("_gather_rows", "_gather_part", "_add", "_widen"):
            monkeypatch.setattr(rows, name, None)
    return slots


def a_state(page_size: int) -> SlotState:
    most = WIDTH * page_size - 12
    length = torch.randint(0, most, (SLOTS + 1,))
    length[-1] = 0
    table = torch.randint(0, PAGES, (SLOTS + 1, WIDTH), dtype=torch.int32)
    table[-1] = PAGES
    last, seed = torch.randint(0, 99, (SLOTS + 1,)), torch.randint(-(2**62), 2**62, (SLOTS + 1,))
    return SlotState(length, last, seed, table, page_size)


def room(tokens: int) -> TokenInputs:
    token_ids, positions, mapping = (torch.full((tokens,), -7) for _ in range(3))
    return TokenInputs(token_ids, positions, mapping, torch.full((tokens,), -7, dtype=torch.int32))


def place(state: SlotState, slot: int, position: int) -> int:
    page = int(state.page_table[slot, position // state.page_size])
    return page * state.page_size + position % state.page_size


@pytest.mark.parametrize("page_size", [2, 5, 16])
def test_decode_takes_each_slot_one_token_on_and_leaves_the_scratch_slot(
    module: ModuleType, page_size: int
) -> None:
    state, out = a_state(page_size), room(8)
    before, rows_ = state.length.tolist(), [4, 1, SLOTS, 0, SLOTS, SLOTS]
    module.prepare_decode(state, torch.tensor(rows_), out)
    assert out.token_ids.tolist()[:6] == [int(state.last_token[slot]) for slot in rows_]
    assert out.positions.tolist() == [before[slot] for slot in rows_] + [-7, -7]
    assert out.slot_mapping.tolist()[:6] == [place(state, s, before[s]) for s in rows_]
    assert out.seq_lens.tolist() == [before[slot] + 1 for slot in rows_] + [-7, -7]
    expected = [n + (slot in (4, 1, 0)) for slot, n in enumerate(before)]
    assert state.length.tolist() == expected


@pytest.mark.parametrize("page_size", [2, 5, 16])
def test_rows_of_any_length_follow_what_their_slots_hold(
    module: ModuleType, page_size: int
) -> None:
    state, out = a_state(page_size), room(20)
    before = state.length.tolist()
    lengths, from_host, chosen = [3, 1, 7, 1], [True, False, True, True], [2, 0, 5, 3]
    ids = [random.randrange(99) for _ in range(sum(lengths))]
    row = [r for r, n in enumerate(lengths) for _ in range(n)]
    starts = [sum(lengths[:r]) for r in range(5)]
    module.prepare_tokens(
        state,
        HostRows(
            torch.tensor(chosen), torch.tensor(starts).int(), torch.tensor(from_host),
            torch.tensor(ids), torch.tensor(row),
        ),
        out,
    )  # fmt: skip
    for token, r in enumerate(row):
        position = before[chosen[r]] + token - starts[r]
        expected = ids[token] if from_host[r] else int(state.last_token[chosen[r]])
        assert int(out.token_ids[token]) == expected
        assert int(out.positions[token]) == position
        assert int(out.slot_mapping[token]) == place(state, chosen[r], position)
    assert out.token_ids.tolist()[len(row) :] == [-7] * 8
    new = [before[slot] + n for slot, n in zip(chosen, lengths, strict=True)]
    assert out.seq_lens.tolist()[:4] == new
    assert [int(state.length[slot]) for slot in chosen] == new
    assert [int(state.length[slot]) for slot in (1, 4, 6)] == [before[slot] for slot in (1, 4, 6)]


def test_page_updates_sampling_state_and_feeding_back(module: ModuleType) -> None:
    state = a_state(4)
    table, last = state.page_table.clone(), state.last_token.clone()
    places = torch.tensor([3 * WIDTH + 2, SLOTS * WIDTH, 0, SLOTS * WIDTH])
    module.update_pages(state.page_table, places, torch.tensor([11, PAGES, 12, PAGES]).int())
    table[3, 2], table[0, 0] = 11, 12
    assert torch.equal(state.page_table, table)
    chosen = torch.tensor([5, 0, SLOTS])
    seeds, positions = module.sampling_state(state, chosen)
    assert torch.equal(seeds, state.seed[chosen]) and torch.equal(positions, state.length[chosen])
    module.feed_back(state, chosen[:2], torch.tensor([42, 43]))
    last[5], last[0] = 42, 43
    assert torch.equal(state.last_token, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 5000])
def test_rows_are_picked_added_and_widened(
    module: ModuleType, dtype: torch.dtype, size: int
) -> None:
    table, x = torch.randn(50, size).to(dtype), torch.randn(9, size).to(dtype)
    indices, out = torch.randint(0, 50, (9,)), torch.full((9, size), torch.nan, dtype=dtype)
    assert rows.gather_rows(table, indices, out) is out
    assert torch.equal(out, table[indices])
    assert torch.equal(rows.gather_rows(table, indices), table[indices])
    rows.add_to(out, x)
    assert torch.equal(out, table[indices] + x)
    wide = torch.full((9, size), torch.nan)
    rows.widen(x, wide)
    assert torch.equal(wide, x.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 5000])
@pytest.mark.parametrize(("first", "count"), [(0, 50), (0, 16), (16, 16), (40, 10), (50, 16)])
def test_rows_of_a_part_are_picked_and_others_are_zero(
    module: ModuleType, first: int, count: int, size: int, dtype: torch.dtype
) -> None:
    whole = torch.randn(70, size).to(dtype)
    whole[0] = torch.nan  # nothing but zeros may come of rows elsewhere
    part = whole[first : first + count].clone()
    indices = torch.cat([torch.randint(0, 50, (60,)), torch.tensor([0, 15, 16, 31, 32, 49])])
    out = torch.full((len(indices), size), torch.nan, dtype=dtype)
    rows.gather_part(part, indices, first, out)
    inside = (indices >= first) & (indices < first + count)
    expected = whole[indices].masked_fill(~inside.unsqueeze(1), 0)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
