"""Sampling and what forbids tokens before it, against plain formulas and statistics."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.kernels import host, sampling
from treadle.kernels import reference_sampling as reference

Implementation = Callable[..., Callable[..., Any]]
Sample = Callable[..., Tensor]

NEVER = -math.inf


@pytest.fixture
def sample(implementation: Implementation) -> Sample:
    return implementation(sampling, "sample")


@pytest.fixture
def any_thread_count() -> Iterator[Callable[[int], None]]:
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)


def make_seeds(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 2**20, (rows,))


def make_logits(vocab: int) -> Tensor:
    """Rows that are hard to prune, or that rounding could lead astray."""
    x = torch.randn(vocab)
    rows = [
        x,
        x * 5,
        x * 1000,
        torch.zeros(vocab),  # every token is a candidate
        x * 1e-3 - 70_000,
        x.sort().values,  # a better one in every block
        x.round(),  # equals, zeros of both signs among them
        torch.where(torch.rand(vocab) < 0.9, NEVER, x),
        torch.where(torch.rand(vocab) < 0.3, math.nan, x),
        torch.where(torch.arange(vocab) == vocab // 2, 40.0, x),
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("vocab", [1, 17, 300, 9001, 40_000])
def test_greedy_takes_the_likeliest_of_lowest_id(sample: Sample, vocab: int) -> None:
    logits = torch.randint(-3, 4, (6, vocab)).float()
    logits[logits == 0] *= -1
    for temperature in (None, torch.zeros(6)):
        found = sample(logits, temperature, *make_seeds(6))
        for row, token in zip(logits, found.tolist(), strict=True):
            assert token == row.tolist().index(row.max())


def test_zero_temperature_row_is_greedy_beside_random_ones(sample: Sample) -> None:
    x = torch.randn(3, 50)
    found = sample(x, torch.tensor([0.0, 50.0, 0.0]), *make_seeds(3))
    assert found[0] == x[0].argmax() and found[2] == x[2].argmax()


def test_noise_is_the_inverse_distribution_function_at_hashed_numbers() -> None:
    seeds, positions = make_seeds(8)
    found = sampling.gumbel(seeds, positions, torch.arange(700)).double()
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    want = torch.stack([reference.gumbel(seed, position, 700) for seed, position in pairs])
    # in fp32 the hashed number can not come near 1, where noise is lowest
    low = want < -1.5
    torch.testing.assert_close(found[~low], want[~low], rtol=1e-6, atol=1e-5)
    assert (found[low] < -1.45).all() and found.isfinite().all()


@pytest.mark.parametrize("vocab", [1, 300, 2500])
def test_draw_has_the_best_score_of_the_reference(sample: Sample, vocab: int) -> None:
    logits = make_logits(vocab)[[0, 1, 3, 4, 5, 6, 7, 9]]
    logits[:, vocab // 3] = 0.1
    temperature, (seeds, positions) = torch.rand(8) * 2 + 0.1, make_seeds(8)
    found = sample(logits, temperature, seeds, positions)
    for n, token in enumerate(found.tolist()):
        noise = reference.gumbel(int(seeds[n]), int(positions[n]), vocab)
        scores = logits[n].double() / float(temperature[n]) + noise
        best = scores.max()
        # the scores' own rounding: 2e-6 near the peak, and that of a far peak's logits
        assert scores[token] > best - 1e-5 - abs(best) * 2e-7


def plain_draw(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """The formula in fp32, one token after the other, by the C library's logarithms."""
    libm = ctypes.CDLL(None)
    logf, log1pf = libm.logf, libm.log1pf
    for function in (logf, log1pf):
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    f32 = np.float32
    peak, best, drawn = f32(np.nanmax(logits.numpy())), f32(NEVER), 0
    numbers = reference.uniform(seed, position, len(logits))
    for token, (logit, u) in enumerate(zip(logits.numpy(), numbers, strict=True)):
        v = min((f32(int(u * 2**31)) + f32(0.5)) * f32(2.0**-31), f32(1 - 2.0**-24))
        noise = -logf(-log1pf(float(-v)))
        score = (logit - peak) / f32(temperature) + f32(noise)
        if score > best:
            best, drawn = score, token
    return drawn


@pytest.mark.parametrize("temperature", [1.0, 0.3, 30.0, 1e-5])
@pytest.mark.parametrize("vocab", [1, 255, 9001])
def test_host_draw_has_the_bits_of_the_plain_formula(vocab: int, temperature: float) -> None:
    if host.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    logits = make_logits(vocab)
    logits[logits.isnan().all(-1) | (logits == NEVER).all(-1)] = 0
    seeds, positions = make_seeds(len(logits))
    found = sampling.sample(logits, torch.full((len(logits),), temperature), seeds, positions)
    with np.errstate(over="ignore", invalid="ignore"):
        want = [
            plain_draw(row, temperature, int(seed), int(position))
            for row, seed, position in zip(logits, seeds, positions, strict=True)
        ]
    assert found.tolist() == want


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-3])
def test_host_draw_finds_the_best_of_scores_that_nearly_tie(spread: float) -> None:
    if host.LIBRARY is None:
        pytest.skip("the host kernels are not built")
    rows, vocab = 12, 3000
    seeds, positions = make_seeds(rows)
    logits = torch.randn(rows, vocab) * spread
    logits -= sampling.gumbel(seeds, positions, torch.arange(vocab))
    found = sampling.sample(logits, torch.ones(rows), seeds, positions)
    pairs = zip(logits, seeds.tolist(), positions.tolist(), strict=True)
    assert found.tolist() == [plain_draw(row, 1.0, *pair) for row, *pair in pairs]


def test_host_draw_does_not_depend_on_threads(
    any_thread_count: Callable[[int], None],
) -> None:
    logits = torch.randn(3, 40_000)
    temperature, seeds = torch.tensor([1.0, 0.0, 3.0]), make_seeds(3)
    found = []
    for threads in (1, 2, 3, 8):
        any_thread_count(threads)
        found.append(sampling.sample(logits, temperature, *seeds).tolist())
    assert all(tokens == found[0] for tokens in found)


def test_row_depends_on_its_own_seed_and_position_only(sample: Sample) -> None:
    x, temperature = torch.randn(64, 1000) * 3, torch.rand(64) * 2
    seeds, positions = make_seeds(64)
    together = sample(x, temperature, seeds, positions)
    order = torch.randperm(64)
    shuffled = sample(x[order], temperature[order], seeds[order], positions[order])
    assert together[order].tolist() == shuffled.tolist()
    rows = [slice(n, n + 1) for n in range(64)]
    alone = [int(sample(x[n], temperature[n], seeds[n], positions[n])) for n in rows]
    assert together.tolist() == alone


def test_seed_and_position_change_the_draw(sample: Sample) -> None:
    rows, vocab = 400, 1000
    x, temperature = torch.zeros(rows, vocab), torch.ones(rows)
    seeds, positions = make_seeds(rows)
    found = sample(x, temperature, seeds, positions)
    for others in [(seeds + 1, positions), (seeds, positions + 1), (positions, seeds)]:
        same = (found == sample(x, temperature, *others)).sum()
        assert same < 12, "expected 0.4 of them by chance"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_tempered_softmax(sample: Sample, temperature: float, vary: str) -> None:
    draws, vocab = 20_000, 12
    x = torch.randn(vocab)
    expected = torch.softmax(x / temperature, 0) * draws
    numbers, same = torch.arange(draws), torch.full((draws,), 1234, dtype=torch.int64)
    seeds, positions = (numbers, same) if vary == "seed" else (same, numbers)
    found = sample(x.repeat(draws, 1), torch.full((draws,), temperature), seeds, positions)
    counts = torch.bincount(found, minlength=vocab)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert statistic < 50, "chi-square, 11 degrees of freedom: p < 1e-6"


def test_neighbouring_seeds_and_positions_draw_independently(sample: Sample) -> None:
    draws, vocab = 16_384, 4
    seeds, positions = torch.arange(draws) // 128, torch.arange(draws) % 128
    found = sample(torch.zeros(draws, vocab), torch.ones(draws), seeds, positions).view(128, 128)
    for one, other in [(found[1:], found[:-1]), (found[:, 1:], found[:, :-1])]:
        counts = torch.bincount((one * vocab + other).flatten(), minlength=vocab**2)
        expected = one.numel() / vocab**2
        statistic = ((counts - expected) ** 2 / expected).sum().item()
        assert statistic < 60, "chi-square, 15 degrees of freedom: p < 3e-7"


def test_unlikely_tokens_are_drawn_as_often_as_they_should(sample: Sample) -> None:
    draws = 50_000
    x = torch.tensor([0.0, *[-9.0] * 40]).repeat(draws, 1)
    found = sample(x, torch.ones(draws), torch.arange(draws), torch.full((draws,), 7))
    chance = 40 * math.exp(-9) / (1 + 40 * math.exp(-9))
    assert abs((found > 0).sum() - chance * draws) < 6 * math.sqrt(chance * draws)


def test_rounding_of_logits_rarely_changes_a_draw(sample: Sample) -> None:
    rows, vocab = 1000, 2000
    x, temperature, (seeds, positions) = torch.randn(rows, vocab) * 3, None, make_seeds(rows)
    temperature = torch.ones(rows)
    rounded = x + torch.randn(rows, vocab) * 1e-3
    flips = sample(x, temperature, seeds, positions) != sample(
        rounded, temperature, seeds, positions
    )
    targets = torch.rand(rows, 1)
    inverted = [
        torch.searchsorted(logits.softmax(-1).cumsum(-1), targets) for logits in (x, rounded)
    ]
    inversion_flips = (inverted[0] != inverted[1]).sum()
    assert flips.sum() < rows / 100
    assert flips.sum() * 3 < inversion_flips


def test_impossible_tokens_are_never_drawn(sample: Sample) -> None:
    x = torch.full((500, 4000), NEVER)
    x[:, 7], x[:, 3100] = 1.0, 0.5
    found = sample(x, torch.ones(500), torch.arange(500), torch.zeros(500, dtype=torch.int64))
    assert set(found.tolist()) == {7, 3100}


@pytest.mark.parametrize("vocab", [3, 9001])
def test_numbers_are_chosen_before_what_is_none(sample: Sample, vocab: int) -> None:
    x = torch.full((2, vocab), math.nan)
    x[0, 1], x[1, vocab - 1] = -1e30, 5.0
    for temperature in (None, torch.ones(2)):
        assert sample(x, temperature, *make_seeds(2)).tolist() == [1, vocab - 1]


@pytest.mark.parametrize("vocab", [3, 9001])
def test_nothing_possible_still_gives_a_token_of_the_vocabulary(sample: Sample, vocab: int) -> None:
    x = torch.randn(6, vocab)
    x[0], x[1], x[2, ::2], x[3], x[4, 1] = NEVER, math.nan, math.nan, math.inf, math.inf
    for temperature in (None, torch.ones(6), torch.full((6,), 1e-45), torch.full((6,), math.nan)):
        found = sample(x, temperature, *make_seeds(6))
        assert found[0] == 0 and found[1] == 0 and found[4] == 1
        assert ((found >= 0) & (found < vocab)).all()


def test_rows_of_a_wider_head_go_into_a_given_output(sample: Sample) -> None:
    wide, temperature, seeds = torch.randn(5, 1100), torch.rand(5) * 3, make_seeds(5)
    wide[:, 1000:] = 100
    out = torch.full((5,), -1)
    assert sample(wide[:, :1000], temperature, *seeds, out) is out
    assert out.tolist() == sample(wide[:, :1000].contiguous(), temperature, *seeds).tolist()


def test_torch_draws_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (torch.randn(7, 90), torch.rand(7) * 2, *make_seeds(7))
    whole = sampling.sample_torch(*given)
    monkeypatch.setattr(sampling, "_PART", 200)
    assert sampling.sample_torch(*given).tolist() == whole.tolist()


def test_no_rows_give_no_tokens(sample: Sample) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert sample(torch.zeros(0, 8), None, empty, empty).shape == (0,)
    assert sample(torch.zeros(0, 8), torch.zeros(0), empty, empty).shape == (0,)


@pytest.mark.parametrize("vocab", [1, 37, 20_000])
def test_mask_limits_to_what_is_allowed(implementation: Implementation, vocab: int) -> None:
    wide, allowed = torch.randn(4, vocab + 5), torch.rand(4, vocab + 3) < 0.4
    before = wide.clone()
    implementation(sampling, "mask_logits")(wide[:, :vocab], allowed[:, :vocab])
    for n in range(4):
        for token in range(0, vocab, 1 + vocab // 500):
            want = before[n, token] if allowed[n, token] else NEVER
            assert wide[n, token] == want
    assert torch.equal(wide[:, vocab:], before[:, vocab:])


def test_ban_hits_single_tokens_and_skips_padding(implementation: Implementation) -> None:
    wide = torch.randn(4, 60)
    want = wide.clone()
    pairs = [(0, 0), (3, 49), (2, 7), (2, 7), (0, 5)]
    for row, token in pairs:
        want[row, token] = NEVER
    padded = torch.tensor([*pairs, (-1, 0), (-1, 49)])
    rows, ids = padded[:, 0].contiguous(), padded[:, 1].contiguous()
    implementation(sampling, "ban")(wide[:, :50], rows, ids)
    assert torch.equal(wide, want)


def cuts(vocab: int, parts: int) -> list[tuple[int, int]]:
    """Where each part begins and ends: at random, some without columns."""
    inner = torch.randint(0, vocab + 1, (parts - 1,))
    inner[2::2] = inner[0:1]
    edges = sorted([0, vocab, *inner.tolist()])
    return list(zip(edges[:-1], edges[1:], strict=True))


def test_row_peaks_are_the_largest_numbers(implementation: Implementation) -> None:
    wide = make_logits(5000)
    wide[4], wide[5, 3], wide[6, :4000] = math.nan, math.inf, NEVER
    for x in (wide, wide[:, 17:18], wide[:, 100:4900]):
        found = implementation(sampling, "row_peaks")(x)
        want = [max((v for v in row if v == v), default=NEVER) for row in x.tolist()]
        assert found.dtype is torch.float32 and found.tolist() == want
    out = torch.zeros(10)
    assert implementation(sampling, "row_peaks")(wide[:, :0], out) is out
    assert out.tolist() == [NEVER] * 10


@pytest.mark.parametrize("temperature", [None, 0.0, 1e-3, 0.3, 1.0, 100.0, math.inf, math.nan])
@pytest.mark.parametrize("vocab", [5, 1000, 20_000])
def test_best_of_any_parts_is_the_choice_of_whole_rows(
    implementation: Implementation, vocab: int, temperature: float | None
) -> None:
    sample = implementation(sampling, "sample")
    row_peaks = implementation(sampling, "row_peaks")
    best_keys = implementation(sampling, "best_keys")
    x = torch.cat([make_logits(vocab), make_logits(vocab)])
    x[0], x[1], x[2, : vocab // 2], x[3, vocab // 2 :] = NEVER, math.nan, math.nan, NEVER
    x[4, ::2], x[5, -1] = NEVER, math.inf
    seeds, positions = make_seeds(20)
    near = torch.randn(20, vocab) * 1e-6 - sampling.gumbel(seeds, positions, torch.arange(vocab))
    x = torch.stack([x, near]).view(40, vocab)  # rows of both kinds with the same seeds
    seeds, positions = seeds.repeat(2), positions.repeat(2)
    warm = None if temperature is None else torch.full((40,), temperature)
    if warm is not None:
        warm[6:30:5] = torch.rand(5)
        warm[7] = 0
    want = sample(x, warm, seeds, positions)
    for parts in (1, 2, 3, 8):
        edges = cuts(vocab, parts)
        peaks = torch.stack([row_peaks(x[:, begin:end]) for begin, end in edges]).amax(0)
        given = None if warm is None else peaks
        keys = [
            best_keys(x[:, begin:end], warm, seeds, positions, begin, given) for begin, end in edges
        ]
        assert torch.equal(sampling.ids_of(torch.stack(keys).amax(0)), want)


def test_keys_order_by_score_then_by_lowest_id(implementation: Implementation) -> None:
    best_keys = implementation(sampling, "best_keys")
    scores = [*torch.randn(6).tolist(), 0.0, 1e-45, -1e-45, 3e38, -3e38, NEVER, math.inf]
    pairs = [(score, token) for score in scores for token in (0, 1, 2**16, 2**31 - 2)]
    keys = []
    for score, first_id in pairs:
        key = best_keys(torch.tensor([[score]]), None, *make_seeds(1), first_id, None)
        assert implementation(sampling, "ids_of")(key).tolist() == [first_id]
        keys.append(int(key))
    order = sorted(range(len(pairs)), key=lambda at: (pairs[at][0], -pairs[at][1]))
    assert [keys[at] for at in order] == sorted(set(keys))
    out = torch.zeros(2, dtype=torch.int64)
    nothing = best_keys(torch.zeros(2, 0), torch.ones(2), *make_seeds(2), 9, torch.zeros(2), out)
    assert nothing is out and out.tolist() == [-(2**63)] * 2 and min(keys) > -(2**63)
    zeros = [best_keys(torch.tensor([[x]]), None, *make_seeds(1), 5, None) for x in (0.0, -0.0)]
    assert torch.equal(*zeros)


@pytest.mark.parametrize("vocab", [1, 300, 9001])
def test_part_that_is_everything_needs_no_peaks(implementation: Implementation, vocab: int) -> None:
    x, (seeds, positions), warm = make_logits(vocab), make_seeds(10), torch.rand(10) * 3
    keys = implementation(sampling, "best_keys")(x, warm, seeds, positions, 0, None)
    want = implementation(sampling, "sample")(x, warm, seeds, positions)
    assert implementation(sampling, "ids_of")(keys, keys) is keys
    assert torch.equal(keys, want)


def test_host_and_torch_make_the_same_greedy_keys() -> None:
    x, seeds = make_logits(700).nan_to_num(), make_seeds(10)
    host_keys = sampling.best_keys(x, None, *seeds, 123, None)
    assert torch.equal(host_keys, sampling.best_keys_torch(x, None, *seeds, 123, None))


@pytest.mark.parametrize("columns", [0, 1, 20])
def test_bans_of_other_parts_are_harmless(implementation: Implementation, columns: int) -> None:
    wide, first_id = torch.randn(3, 30), 100
    want = wide.clone()
    rows, ids = torch.randint(-1, 3, (200,)), torch.randint(60, 160, (200,))
    ids[:3] = torch.tensor([99, 100 + columns, 2**31])
    for row, token in zip(rows.tolist(), ids.tolist(), strict=True):
        if row >= 0 and first_id <= token < first_id + columns:
            want[row, token - first_id] = NEVER
    implementation(sampling, "ban")(wide[:, :columns], rows, ids, first_id)
    assert torch.equal(wide, want)


def test_recorded_parts_read_what_is_there_when_played(played: Callable[..., Any]) -> None:
    logits, temperature, (seeds, positions) = torch.randn(3, 400), torch.zeros(3), make_seeds(3)
    rows, ids, peaks = torch.full((1,), -1), torch.zeros(1, dtype=torch.int64), torch.zeros(3)

    def body() -> tuple[Tensor, Tensor, Tensor]:
        part = logits[:, 100:]
        sampling.ban(part, rows, ids, 100)
        keys = sampling.best_keys(part, temperature, seeds, positions, 100, peaks)
        return sampling.row_peaks(part), keys, sampling.ids_of(keys)

    def change() -> None:
        temperature.fill_(5)
        rows[0], ids[0] = 1, 7 + 100
        logits.mul_(3)
        peaks.fill_(20)

    found, keys, tokens = played(body, change)
    assert logits[1, 107] == NEVER
    want = sampling.best_keys(logits[:, 100:], temperature, seeds, positions, 100, peaks)
    assert torch.equal(found, logits[:, 100:].amax(1)) and torch.equal(keys, want)
    assert torch.equal(tokens, sampling.ids_of(want))


def test_recorded_calls_read_what_is_there_when_played(played: Callable[..., Any]) -> None:
    logits, temperature = torch.randn(3, 400), torch.zeros(3)
    allowed = torch.ones(3, 400, dtype=torch.bool)
    rows, ids = torch.full((2,), -1), torch.zeros(2, dtype=torch.int64)
    seeds, positions = make_seeds(3)
    now = logits * 2

    def body() -> Tensor:
        sampling.mask_logits(logits, allowed)
        sampling.ban(logits, rows, ids)
        return sampling.sample(logits, temperature, seeds, positions)

    def change() -> None:
        allowed[1, ::2] = False
        rows[0], ids[0] = 2, 9
        now[1, ::2], now[2, 9] = NEVER, NEVER
        logits.mul_(2)
        temperature.fill_(5)
        seeds.add_(1)
        positions.add_(1)

    found = played(body, change)
    assert torch.equal(logits, now)
    assert found.tolist() == sampling.sample(now, temperature, seeds, positions).tolist()
