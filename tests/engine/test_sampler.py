"""Sampling draws from softmax(logits / T) and depends on seed, position and token alone."""

import math

import pytest
import torch

from stoker.engine.sampler import gumbel, sample


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2.0), statistic / 2.0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_match_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.7])
    counts = torch.zeros(6)
    draws = 20_000
    for position in range(draws):
        counts[sample(logits, temperature, seed=7, position=position)] += 1
    expected = torch.softmax(logits / temperature, -1) * draws
    assert chi_square_p(counts, expected) > 1e-3
    biased = torch.softmax(logits / (temperature * 1.1), -1) * draws
    assert chi_square_p(counts, biased) < 1e-3  # the same test notices a temperature 10 % off


def test_noise_has_the_gumbel_mean_and_variance() -> None:
    noise = gumbel(200_000, seed=1, position=2)
    assert abs(noise.mean().item() - 0.57722) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03


def test_noise_depends_on_seed_and_position_and_nothing_else() -> None:
    assert torch.equal(gumbel(100, 3, 5), gumbel(100, 3, 5))
    assert torch.equal(gumbel(100, 3, 5), gumbel(1000, 3, 5)[:100])
    assert not torch.equal(gumbel(100, 3, 5), gumbel(100, 3, 6))
    assert not torch.equal(gumbel(100, 3, 5), gumbel(100, 4, 5))
    assert not torch.equal(gumbel(100, 3, 5), gumbel(100, 5, 3))


def test_temperature_zero_is_greedy_and_ties_go_to_the_lowest_id() -> None:
    assert sample(torch.tensor([0.0, 3.0, 3.0, 1.0]), 0.0, seed=9, position=4) == 1
