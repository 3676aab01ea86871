from __future__ import annotations

import math

import pytest
import torch

from treadle.graphs.sampler import sample, uniform


def logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab) * 3


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_greedy_takes_the_likeliest() -> None:
    x = logits(5, 100)
    found = sample(x, None, ids(*range(5)), ids(*range(5)))
    assert found.tolist() == x.argmax(-1).tolist()


def test_zero_temperature_row_is_greedy_beside_random_ones() -> None:
    x = logits(3, 50)
    found = sample(x, torch.tensor([0.0, 5.0, 0.0]), ids(1, 2, 3), ids(4, 5, 6))
    assert found[0] == x[0].argmax() and found[2] == x[2].argmax()


def test_row_depends_on_its_own_seed_and_position_only() -> None:
    x = logits(64, 1000)
    temperature = torch.full((64,), 1.5)
    seeds, positions = torch.randint(-(2**62), 2**62, (64,)), torch.arange(64)
    together = sample(x.clone(), temperature, seeds, positions)
    order = torch.randperm(64)
    shuffled = sample(x[order], temperature, seeds[order], positions[order])
    assert together[order].tolist() == shuffled.tolist()
    alone = [
        int(sample(x[i : i + 1].clone(), temperature[:1], seeds[i : i + 1], positions[i : i + 1]))
        for i in range(64)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature: float) -> None:
    draws, vocab = 20_000, 12
    x = torch.randn(vocab)
    expected = torch.softmax(x / temperature, 0) * draws
    found = sample(
        x.repeat(draws, 1),
        torch.full((draws,), temperature),
        torch.full((draws,), 1234, dtype=torch.int64),
        torch.arange(draws),
    )
    counts = torch.bincount(found, minlength=vocab)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert statistic < 40, "chi-square, 11 degrees of freedom: p < 4e-5"


def test_uniform_numbers_are_spread_and_never_one() -> None:
    numbers = uniform(torch.arange(4096) // 64, torch.arange(4096) % 64)
    assert 0 <= numbers.min() and numbers.max() < 1
    assert abs(numbers.mean().item() - 0.5) < 0.03
    assert len(set(numbers.tolist())) > 4080
    buckets = torch.histc(numbers, bins=16, min=0, max=1)
    assert (buckets - 256).abs().max() < 6 * math.sqrt(256)


def test_impossible_tokens_are_never_drawn() -> None:
    x = torch.full((500, 40), -torch.inf)
    x[:, 7], x[:, 31] = 1.0, 0.5
    found = sample(x, torch.ones(500), torch.arange(500), torch.zeros(500, dtype=torch.int64))
    assert set(found.tolist()) == {7, 31}


def test_mask_limits_greedy_and_random_rows() -> None:
    x = logits(200, 30)
    mask = torch.rand(200, 30) < 0.2
    mask[:, 3] = True
    temperature = torch.where(torch.arange(200) % 2 == 0, 0.0, 1.0)
    found = sample(x.clone(), temperature, torch.arange(200), torch.arange(200), mask)
    assert mask[torch.arange(200), found].all()
    best = x.masked_fill(~mask, -torch.inf).argmax(-1)
    assert (found[::2] == best[::2]).all()


def test_no_rows_give_no_tokens() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert sample(torch.zeros(0, 8), None, empty, empty).shape == (0,)
    assert sample(torch.zeros(0, 8), torch.zeros(0), empty, empty).shape == (0,)
