"""Tests and intervals hold what their level promises, counted on made-up comparisons with a known truth."""

import math

import numpy as np
import pytest

from stoker.check import statistics


def test_mcnemar_is_the_exact_binomial():
    assert statistics.mcnemar(0, 0) == 1.0
    assert statistics.mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert statistics.mcnemar(3, 9) == pytest.approx(2 * (1 + 12 + 66 + 220) / 2**12)
    assert statistics.mcnemar(7, 7) == 1.0
    assert statistics.mcnemar(400, 700) < 1e-15


def test_agreement_on_every_item_still_leaves_room():
    low, high = statistics.paired_share(0, 0, 240)
    assert low == pytest.approx(-0.0158, abs=2e-4)
    assert high == pytest.approx(0.0158, abs=2e-4)
    low, high = statistics.paired_mean([0.0] * 240)
    assert low < -0.005
    assert high > 0.005
    assert statistics.mean_interval([1.0] * 50)[0] < 0.995


def test_tangos_interval_as_published():
    """Tango 1998, the crossover trial of two soft contact lens disinfection systems: 1 against 0 of 44 pairs."""
    low, high = statistics.paired_share(1, 0, 44)
    assert low == pytest.approx(-0.0596, abs=2e-3)
    assert high == pytest.approx(0.1181, abs=2e-3)


@pytest.mark.parametrize(("gain", "loss"), [(0.02, 0.02), (0.03, 0.09), (0.0, 0.05)])
def test_paired_intervals_cover_the_truth(gain, loss):
    rng, covered, trials, count = np.random.default_rng(1), 0, 600, 150
    for _ in range(trials):
        drawn = rng.multinomial(count, (gain, loss, 1 - gain - loss))
        low, high = statistics.paired_share(int(drawn[0]), int(drawn[1]), count)
        covered += low <= gain - loss <= high
    assert covered / trials > 0.92


def test_a_server_against_itself_is_seldom_called_different():
    rng, alarms, trials = np.random.default_rng(2), 0, 2000
    for _ in range(trials):
        unlike = int(rng.binomial(200, 0.1))
        gained = int(rng.binomial(unlike, 0.5))
        alarms += statistics.mcnemar(gained, unlike - gained) < 0.05
    assert alarms / trials <= 0.05


def test_items_needed_find_the_difference_as_often_as_promised():
    rng, found, trials = np.random.default_rng(3), 0, 2000
    count = statistics.items_needed(0.06, 0.1)
    for _ in range(trials):
        gained, lost, _same = rng.multinomial(count, (0.02, 0.08, 0.9))
        found += statistics.mcnemar(int(gained), int(lost)) < 0.05
    assert 0.72 < found / trials < 0.87
    assert statistics.smallest_difference(count, 0.1) == pytest.approx(0.06, abs=1e-3)
    assert statistics.items_needed(0.03) > statistics.items_needed(0.06) > 100


def test_the_permutation_test_is_exact_for_few_and_close_for_many():
    assert statistics.permutation([0.5] * 5) == pytest.approx(2 / 2**5)
    assert statistics.permutation([0.0] * 9) == 1.0
    assert statistics.permutation([0.1, -0.1] * 20) == 1.0
    assert statistics.permutation([0.1] * 40) < 0.001


def test_score_intervals_cover_the_truth():
    rng, covered, trials = np.random.default_rng(4), 0, 200
    for _ in range(trials):
        values = rng.choice((-0.4, 0.0, 0.0, 0.2), 120)
        low, high = statistics.paired_mean(values.tolist())
        covered += low <= -0.05 <= high
    assert covered / trials > 0.92


def test_wilson_and_holm():
    low, high = statistics.wilson(50, 50)
    assert low == pytest.approx(0.9287, abs=1e-4)
    assert high == 1.0
    assert statistics.wilson(0, 0) == (0.0, 1.0)
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([]) == []
    assert not math.isnan(statistics.paired_share(3, 1, 4)[0])
