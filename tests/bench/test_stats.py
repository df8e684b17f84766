"""Intervals, and that a difference smaller than the noise is called noise."""

from random import Random

import pytest

from stoker.bench.stats import change, interval, percentiles, spread, verdict


def _runs(middle: float, noise: float, count: int, seed: int) -> list[float]:
    dice = Random(seed)
    return [middle * (1 + dice.gauss(0, noise)) for _ in range(count)]


def test_percentiles_count_tokens_not_chunks():
    found = percentiles([0.1, 0.01], [1, 9])
    assert found is not None
    assert found.p50 == pytest.approx(0.01)
    assert found.p99 == pytest.approx(0.01 + 0.09 * 0.91)
    assert percentiles([]) is None


def test_an_interval_holds_the_median_and_is_the_same_every_time():
    values = _runs(50, 0.05, 20, 1)
    low, high = interval(values)
    assert low < 50 < high
    assert high - low < 5
    assert interval(values) == (low, high)
    found = spread(values)
    assert found is not None
    assert found.low == min(values)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    hits = sum(low < 50 < high for low, high in (interval(_runs(50, 0.06, 15, seed)) for seed in range(200)))
    assert hits > 175


def test_noise_is_called_noise_and_a_gain_a_gain():
    a = _runs(50, 0.06, 8, 1)
    for factor, wanted in ((1.0, "within the noise"), (1.3, "better"), (0.7, "worse")):
        b = [value * factor for value in _runs(50, 0.06, 8, 2)]
        middle, low, high = change(a, b, paired=False)
        assert verdict(low, high, middle, 8, higher_is_better=True) == wanted


def test_small_differences_of_few_runs_are_not_called():
    middle, low, high = change([50, 50.1, 50.2], [52, 52.1, 52.2], paired=False)
    assert low > 0
    assert verdict(low, high, middle, 3, higher_is_better=True) == "too few runs"
    assert verdict(0.2, 0.3, 0.25, 3, higher_is_better=True) == "better"
    assert verdict(0.2, 0.3, 0.25, 1, higher_is_better=True) == "too few runs"
    assert verdict(0.2, 0.3, 0.25, 5, higher_is_better=False) == "worse"
    assert verdict(0.2, 0.3, 0.25, 5, higher_is_better=None) == "different"


def test_pairs_see_through_a_drift_that_hits_both():
    drift = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    a, b = [50 * d for d in drift], [53 * d for d in drift]
    middle, low, high = change(a, b, paired=True)
    assert (middle, low, high) == pytest.approx((0.06, 0.06, 0.06))
    _, low, high = change(a, b, paired=False)
    assert low < 0 < high
