"""Triton's sampling, masks, penalties and logprobs against their plain meaning."""

from __future__ import annotations

import math

import pytest
import torch

from treadle.kernels import reference_sampling as reference
from treadle.kernels.sampling import best_keys_torch, gumbel, ids_of, sample_torch

pytest.importorskip("triton")

from treadle.kernels.gpu import bitmask, logprobs, penalties, sampling, summary  # noqa: E402


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of several parts without a large vocabulary."""
    monkeypatch.setattr(summary, "_MAX_CHUNK", 512)


def make_seeds(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 2**20, (rows,))


def draw(
    device: torch.device,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    seeds: tuple[torch.Tensor, torch.Tensor],
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    found = sampling.sample(
        logits.to(device),
        None if temperature is None else temperature.to(device),
        seeds[0].to(device),
        seeds[1].to(device),
        None if filters is None else sampling.Filters(*(x.to(device) for x in filters)),
    )
    assert found.dtype is torch.int64
    return found.cpu()


@pytest.mark.parametrize("vocab", [1, 17, 512, 1601])
def test_greedy_takes_the_likeliest_of_lowest_id(gpu_device: torch.device, vocab: int) -> None:
    logits = torch.randint(-3, 4, (6, vocab)).float()
    found = draw(gpu_device, logits, None, make_seeds(6))
    for row, token in zip(logits, found.tolist(), strict=True):
        assert token == row.tolist().index(row.max())


def assert_best_score(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: tuple[torch.Tensor, torch.Tensor],
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    limits = zip(*(x.tolist() for x in (*seeds, temperature, *filters)), strict=True)
    for n, (seed, position, t, top_k, top_p, min_p) in enumerate(limits):
        noise = reference.gumbel(seed, position, logits.shape[1])
        scores = reference.scores(logits[n], t, top_k, top_p, min_p, noise)
        # fp32 rounds the noise and the sum to 1e-6 or two, a device's logarithm the same
        assert scores[tokens[n]] > scores.max() - 1e-5


@pytest.mark.parametrize("vocab", [2, 40, 600, 1601])
def test_draw_has_the_best_score_of_the_reference(gpu_device: torch.device, vocab: int) -> None:
    logits = torch.randn(16, vocab) * 2
    logits[:, :: max(2, vocab // 9)] = -math.inf
    temperature, seeds = torch.rand(16) * 2 + 0.05, make_seeds(16)
    off = (torch.full((16,), 2**30), torch.ones(16), torch.zeros(16))
    found = draw(gpu_device, logits, temperature, seeds)
    assert_best_score(found, logits, temperature, seeds, off)


def test_draw_is_the_hosts(gpu_device: torch.device) -> None:
    logits, seeds = torch.randn(24, 1601) * 3, make_seeds(24)
    temperature = torch.rand(24) * 2
    temperature[::5] = 0
    found = draw(gpu_device, logits, temperature, seeds)
    assert found.tolist() == sample_torch(logits, temperature, *seeds).tolist()


def test_noise_is_accurate_where_it_is_high(gpu_device: torch.device) -> None:
    """Of equal logits the one with the smallest hashed number wins."""
    rows, vocab = 32, 600
    seeds = make_seeds(rows)
    found = draw(gpu_device, torch.zeros(rows, vocab), torch.ones(rows), seeds)
    for n, token in enumerate(found.tolist()):
        numbers = reference.uniform(int(seeds[0][n]), int(seeds[1][n]), vocab)
        assert numbers[token] <= min(numbers) * (1 + 1e-5)


def make_filters(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every combination of limits, off and on."""
    off = torch.arange(rows)
    top_k = torch.where(off % 2 == 0, 2**30, torch.randint(1, vocab + 1, (rows,))).int()
    top_p = torch.where(off // 2 % 2 == 0, 1.0, torch.rand(rows))
    min_p = torch.where(off // 4 % 2 == 0, 0.0, torch.rand(rows) * 0.3)
    return top_k, top_p, min_p


@pytest.mark.parametrize("vocab", [3, 50, 700])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_filtered_draw_has_the_best_score_of_what_is_kept(
    gpu_device: torch.device, vocab: int, spread: float
) -> None:
    rows = 16
    logits = torch.randn(rows, vocab) * spread
    logits[1::3] = logits[1::3].round()  # equals, zeros of both signs among them
    logits[2::5, ::3] = -math.inf
    temperature = torch.rand(rows) * 1.5 + 0.2
    seeds, filters = make_seeds(rows), make_filters(rows, vocab)
    found = draw(gpu_device, logits, temperature, seeds, filters)
    assert_best_score(found, logits, temperature, seeds, filters)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (7, 1.0, 0.0), (2**30, 0.5, 0.0), (2**30, 0.0, 0.0), (2**30, 1.0, 0.2),
     (5, 0.9, 0.05)],
)  # fmt: skip
def test_draws_cover_exactly_what_is_kept(
    gpu_device: torch.device, top_k: int, top_p: float, min_p: float
) -> None:
    draws, vocab = 24, 20
    row = torch.randn(vocab)
    keep = reference.kept(row, 0.8, top_k, top_p, min_p)
    filters = (
        torch.full((draws,), top_k).int(), torch.full((draws,), top_p), torch.full((draws,), min_p)
    )  # fmt: skip
    temperature, seeds = torch.full((draws,), 0.8), make_seeds(draws)
    found = draw(gpu_device, row.repeat(draws, 1), temperature, seeds, filters)
    assert keep[found].all()
    probabilities = torch.where(keep, (row / 0.8).softmax(0), 0)
    likely = (probabilities / probabilities.sum() > 0.6).nonzero().flatten()
    assert set(likely.tolist()) <= set(found.tolist()), "missed with probability 0.4^24"


def test_greedy_rows_beside_filtered_ones(gpu_device: torch.device) -> None:
    logits, seeds = torch.randn(8, 900), make_seeds(8)
    temperature = torch.where(torch.arange(8) % 2 == 0, 0.0, 1.0)
    found = draw(gpu_device, logits, temperature, seeds, make_filters(8, 900))
    assert found[::2].tolist() == logits[::2].argmax(-1).tolist()


def test_row_depends_on_itself_only(gpu_device: torch.device) -> None:
    logits, temperature, seeds = torch.randn(8, 600), torch.full((8,), 1.5), make_seeds(8)
    filters = make_filters(8, 600)
    together = draw(gpu_device, logits, temperature, seeds, filters)
    order = torch.randperm(8)
    shuffled = draw(
        gpu_device, logits[order], temperature[order], (seeds[0][order], seeds[1][order]),
        (filters[0][order], filters[1][order], filters[2][order]),
    )  # fmt: skip
    assert together[order].tolist() == shuffled.tolist()


def test_no_rows_give_no_tokens(gpu_device: torch.device) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert draw(gpu_device, torch.zeros(0, 8), None, (empty, empty)).shape == (0,)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_nothing_possible_still_gives_a_token_of_the_vocabulary(gpu_device: torch.device) -> None:
    logits = torch.full((3, 700), -math.inf)
    logits[1] = math.nan
    logits[2, ::2] = 1.0
    for filters in (None, make_filters(3, 700)):
        found = draw(gpu_device, logits, torch.ones(3), make_seeds(3), filters)
        assert found[0] == 0 and found[1] == 0 and found[2] % 2 == 0
        assert ((found >= 0) & (found < 700)).all()


def test_tokens_go_into_a_given_output(gpu_device: torch.device) -> None:
    logits, temperature, seeds = torch.randn(4, 600), torch.rand(4), make_seeds(4)
    out = torch.full((4,), -1, device=gpu_device)
    device = gpu_device
    given = (logits.to(device), temperature.to(device), seeds[0].to(device), seeds[1].to(device))
    assert sampling.sample(*given, None, out) is out
    assert out.tolist() == draw(gpu_device, logits, temperature, seeds).tolist()


def keys_of_parts(
    device: torch.device,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    seeds: tuple[torch.Tensor, torch.Tensor],
    edges: list[int],
) -> torch.Tensor:  # the largest of the parts' keys
    parts = [(a, logits[:, a:b].to(device)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    peaks = torch.stack([sampling.row_peaks(part) for _, part in parts]).amax(0)
    warm = None if temperature is None else temperature.to(device)
    given = None if temperature is None else peaks
    numbers, positions = (x.to(device) for x in seeds)
    keys = [sampling.best_keys(part, warm, numbers, positions, a, given) for a, part in parts]
    return torch.stack(keys).amax(0)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("temperature", [None, 1e-3, 1.0, 100.0])
def test_best_of_any_parts_is_the_choice_of_whole_rows(
    gpu_device: torch.device, temperature: float | None
) -> None:
    vocab, seeds = 1300, make_seeds(12)
    noise = gumbel(*seeds, torch.arange(vocab))
    logits = torch.randn(12, vocab)
    logits[0], logits[1], logits[2, :700], logits[3, 600:] = (
        -math.inf,
        math.nan,
        math.nan,
        -math.inf,
    )
    logits[4, ::2], logits[5, 900], logits[6] = math.nan, math.inf, logits[6].round()
    logits[7:] -= noise[7:]  # near ties
    logits[7, :520], logits[8, :600], logits[8, 600:] = -math.inf, math.nan, -math.inf
    warm = None if temperature is None else torch.full((12,), temperature)
    if warm is not None:
        warm[::5] = 0
    want = draw(gpu_device, logits, warm, seeds)
    cut = sorted(torch.randint(0, vocab + 1, (2,)).tolist())
    for edges in ([0, vocab], [0, 0, *cut, vocab, vocab], [0, 512, 1024, vocab]):
        keys = keys_of_parts(gpu_device, logits, warm, seeds, edges)
        assert ids_of(keys).tolist() == want.tolist()
    assert want[:2].tolist() == [0, 0] and want[5] == 900 and want[8] == 0


def test_greedy_keys_are_the_hosts(gpu_device: torch.device) -> None:
    logits, seeds = torch.randn(9, 900).round(), make_seeds(9)
    logits[0], logits[1, 3] = -math.inf, math.inf
    out = torch.zeros(9, dtype=torch.int64, device=gpu_device)
    unread = torch.zeros_like(out)
    assert sampling.best_keys(logits.to(gpu_device), None, unread, unread, 2**30, None, out) is out
    assert torch.equal(out.cpu(), best_keys_torch(logits, None, *seeds, 2**30, None))


def test_part_without_columns_has_the_least_key(gpu_device: torch.device) -> None:
    nothing, some = torch.zeros(3, 0, device=gpu_device), torch.zeros(3, device=gpu_device)
    ids = torch.zeros(3, dtype=torch.int64, device=gpu_device)
    assert sampling.row_peaks(nothing).tolist() == [-math.inf] * 3
    assert sampling.best_keys(nothing, some, ids, ids, 7, some).tolist() == [-(2**63)] * 3


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 2100])
def test_bitmask_forbids_what_has_no_bit(gpu_device: torch.device, vocab: int) -> None:
    logits = torch.randn(3, vocab)
    bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), dtype=torch.int32)
    wide = torch.randn(3, vocab + 5).to(gpu_device)
    wide[:, :vocab] = logits.to(gpu_device)
    beyond = wide[:, vocab:].clone()
    bitmask.apply_bitmask(wide[:, :vocab], bits.to(gpu_device))
    assert torch.equal(wide[:, :vocab].cpu().double(), reference.apply_bitmask(logits, bits))
    assert torch.equal(wide[:, vocab:], beyond)


def test_bitmask_layout_is_little_endian_words(gpu_device: torch.device) -> None:
    logits = torch.zeros(1, 70, device=gpu_device)
    bits = torch.tensor([[1 << 5, -(2**31), 1]], dtype=torch.int32)
    bitmask.apply_bitmask(logits, bits.to(gpu_device))
    assert logits[0].isfinite().nonzero().flatten().tolist() == [5, 63, 64]


@pytest.mark.parametrize("vocab", [5, 33, 1100])
def test_penalties_match(gpu_device: torch.device, vocab: int) -> None:
    rows, pool = 4, 7
    logits = torch.randn(rows, vocab) * 4
    counts = torch.randint(-3, 4, (pool, vocab)).clamp_min(0).int()
    in_prompt = torch.rand(pool, vocab) < 0.3
    padded = torch.zeros(pool, -(-vocab // 32) * 32, dtype=torch.int64)
    padded[:, :vocab] = in_prompt
    words = (padded.view(pool, -1, 32) << torch.arange(32)).sum(-1)
    prompt_bits = torch.where(words >= 2**31, words - 2**32, words).int()
    pool_rows = torch.tensor([6, -1, 0, 3])
    strengths = (torch.randn(rows), torch.randn(rows), torch.rand(rows) * 1.9 + 0.1)
    want = reference.penalize(logits, counts[pool_rows], in_prompt[pool_rows], *strengths)
    want[1] = logits[1].double()
    got = logits.to(gpu_device)
    penalties.penalize(
        got, *(x.to(gpu_device) for x in (pool_rows, counts, prompt_bits, *strengths))
    )
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-5)


def test_counting_adds_every_token_once(gpu_device: torch.device) -> None:
    counts = torch.randint(0, 9, (3, 40)).int()
    rows, tokens = torch.tensor([2, -1, 0, 2, 2]), torch.tensor([5, 6, 39, 5, 7])
    want = counts.clone()
    for row, token in [(2, 5), (0, 39), (2, 5), (2, 7)]:
        want[row, token] += 1
    got = counts.to(gpu_device)
    penalties.count_tokens(got, rows.to(gpu_device), tokens.to(gpu_device))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("vocab", [3, 600, 1601])
def test_logprobs_of_given_tokens(gpu_device: torch.device, vocab: int) -> None:
    logits = torch.randn(4, vocab) * 5 + 100
    logits[1, 1:] = -math.inf
    tokens = torch.randint(0, vocab, (4, 5))
    tokens[1, 0] = 0
    got = logprobs.logprobs(logits.to(gpu_device), tokens.to(gpu_device))
    want = reference.logprobs(logits, tokens)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=3e-5)


def test_top_logprobs_come_likeliest_first(gpu_device: torch.device) -> None:
    logits = torch.randn(3, 700)
    values, ids = logprobs.top_logprobs(logits.to(gpu_device), 6)
    want = logits.log_softmax(-1).topk(6)
    assert torch.equal(ids.cpu(), want.indices)
    torch.testing.assert_close(values.cpu(), want.values, rtol=1e-5, atol=1e-5)
