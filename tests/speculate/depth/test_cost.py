"""Predicted seconds follow measured ones, and the number of experts follows the text."""

import random

import pytest

from stoker.speculate.depth.cost import ExpertPool, LinearFit

TRUE = (0.020, 0.0004, 0.001)  # seconds: fixed, per token, per expert


def measured(shape: tuple[float, ...], steps: int, noise: float = 0.03, seed: int = 0) -> LinearFit:
    rng, fit = random.Random(seed), LinearFit(shape)
    for _ in range(steps):
        tokens = rng.randint(1, 16)
        features = (1.0, tokens, rng.uniform(0.6, 1.0) * 60 * (1 - 0.87**tokens))
        fit.add(features, sum(c * f for c, f in zip(TRUE, features, strict=True)) * rng.gauss(1.0, noise))
    return fit


@pytest.mark.parametrize("shape", [(5e9, 2e7, 2e8), (5e9, 5e8, 1e7), (1e9, 0.0, 2e8)])
def test_the_fit_converges_from_right_and_wrong_guesses_alike(shape: tuple[float, ...]) -> None:
    fit = measured(shape, 300)
    for features in ((1.0, 1.0, 8.0), (1.0, 4.0, 25.0), (1.0, 16.0, 50.0)):
        truth = sum(c * f for c, f in zip(TRUE, features, strict=True))
        assert fit.seconds(features) == pytest.approx(truth, rel=0.05)


def test_a_depth_that_never_changes_leaves_the_bytes_to_decide() -> None:
    fit = LinearFit((5e9, 0.0, 2e8))
    for _ in range(100):
        fit.add((1.0, 3.0, 20.0), 0.045)
    assert fit.seconds((1.0, 3.0, 20.0)) == pytest.approx(0.045, rel=0.01)
    bytes_of_one, bytes_of_three = 5e9 + 8 * 2e8, 5e9 + 20 * 2e8
    assert fit.seconds((1.0, 1.0, 8.0)) == pytest.approx(0.045 * bytes_of_one / bytes_of_three, rel=0.03)


def test_no_part_of_a_step_takes_less_than_no_time() -> None:
    fit, rng = LinearFit((5e9, 2e7, 2e8)), random.Random(3)
    for _ in range(200):  # more experts, less time: nothing that could be true
        experts = rng.uniform(8, 60)
        fit.add((1.0, 3.0, experts), 0.05 - 0.0004 * experts)
    assert min(fit.coefficients) >= 0.0


def test_one_stall_does_not_change_what_steps_are_thought_to_take() -> None:
    fit = measured((5e9, 2e7, 2e8), 200)
    before = fit.seconds((1.0, 3.0, 20.0))
    fit.add((1.0, 3.0, 20.0), 30.0)
    assert fit.seconds((1.0, 3.0, 20.0)) < 1.25 * before


def test_a_slow_first_step_is_forgotten_with_the_second() -> None:
    fit = LinearFit((5e9, 2e7, 2e8))
    fit.add((1.0, 1.0, 8.0), 9.0)
    fit.add((1.0, 1.0, 8.0), 0.03)
    assert fit.seconds((1.0, 1.0, 8.0)) == pytest.approx(0.03, rel=0.05)


def test_the_pool_of_a_text_is_found_from_the_experts_its_blocks_touch() -> None:
    pool = ExpertPool(256, 8)
    assert pool.distinct(1) == pytest.approx(8.0)
    for tokens in (3, 13, 5, 13, 2, 9, 13, 4, 7, 13, 13, 3, 8, 6):
        pool.add(tokens, 28 * (1 - (1 - 8 / 28) ** tokens))
    assert pool.pool == pytest.approx(28, rel=0.05)
    pool.add(1, 8.0)  # one token says nothing about overlap
    assert pool.pool == pytest.approx(28, rel=0.05)


def test_a_dense_model_touches_no_experts() -> None:
    pool = ExpertPool(0, 0)
    pool.add(4, 0.0)
    assert pool.distinct(16) == 0.0


def test_tokens_that_cost_more_than_their_bytes_are_not_taken_for_experts() -> None:
    """On a CPU a token adds arithmetic where bytes foretell next to nothing: short steps must not look dear for it."""
    rng, fit, pool = random.Random(1), LinearFit([6.4e6, 1.9e4, 6.1e5]), ExpertPool(16, 4)
    for _ in range(100):
        tokens = rng.choice([1, 1, 1, 1, 1, 2, 2, 3, 17])
        fit.add((1.0, tokens, pool.distinct(tokens)), 0.002 * (1.0 + 0.24 * (tokens - 1)) * rng.gauss(1.0, 0.05))
    one, two = (fit.seconds((1.0, tokens, pool.distinct(tokens))) for tokens in (1, 2))
    assert two / one - 1.0 == pytest.approx(0.24, abs=0.08)
