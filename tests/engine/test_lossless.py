"""`make lossless` in small: the same configurations, twelve prompts, 64 tokens each, on the embedded model."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from itertools import combinations, product

import pytest
from benchmarks.lossless import FACTORS, Answers, Configuration, Model, compare, covering_set

PROMPTS, TOKENS = 12, 64
Plain = Callable[[str, str], Answers]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def plain(model: Model) -> Plain:
    """KV format and sampling -> answers of requests alone, without drafts."""
    return cache(lambda kv, sampling: model.alone(kv, sampling, 0, PROMPTS, TOKENS))


def test_every_possible_pair_of_settings_is_in_the_set() -> None:
    chosen = covering_set()
    assert len(chosen) >= 12
    assert all(configuration.possible for configuration in chosen)
    for one, two in combinations(FACTORS, 2):
        for values in product(FACTORS[one], FACTORS[two]):
            wanted = dict(zip((one, two), values, strict=True))
            if wanted == {"batch": 1, "preempted": True}:
                continue
            assert any(wanted.items() <= asdict(configuration).items() for configuration in chosen), wanted


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("configuration", covering_set(), ids=str)
def test_every_token_is_that_of_plain_decoding(
    model: Model, plain: Plain, configuration: Configuration, sampling: str
) -> None:
    found = compare(model, configuration, sampling, 0, TOKENS, plain(configuration.kv, sampling))
    assert found["tokens"] == PROMPTS * TOKENS * (1 + configuration.warm)
    assert found["identical"] == found["tokens"]
    assert found["drafted"] > 0  # and the configuration did what it says
    if configuration.warm and not configuration.preempted:
        assert found["cached_tokens"] > 0
    if configuration.preempted:
        assert found["preemptions"] > 0


def test_a_single_other_token_is_found(model: Model, plain: Plain) -> None:
    answers = [list(answer) for answer in plain("bf16", "greedy")]
    answers[5][40] += 1
    found = compare(model, covering_set()[-1], "greedy", 0, TOKENS, answers)
    assert found["tokens"] - found["identical"] == 1


def test_sampled_answers_are_not_the_greedy_ones(plain: Plain) -> None:
    assert plain("bf16", "greedy") != plain("bf16", "sampled")
