"""`make lossless` in small: the same configurations on the embedded model, with fewer and shorter answers.

`make test` lets greedy and sampled requests share their steps, `make test-all` runs each kind by itself too.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from itertools import combinations, product

import pytest
from benchmarks.lossless import FACTORS, Answers, Configuration, Model, compare, covering_set

# Prompts, and tokens of each answer. Prompts of 160 tokens need another page after 32, and somebody must make room.
SIZES = {"mixed": (10, 40), "greedy": (12, 64), "sampled": (12, 64)}
Plain = Callable[[str, str], Answers]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def plain(model: Model) -> Plain:
    """KV format and sampling -> answers of requests alone, without drafts."""
    return cache(lambda kv, sampling: model.alone(kv, sampling, 0, *SIZES[sampling]))


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


@pytest.mark.parametrize(
    "sampling", ["mixed", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("greedy", "sampled"))]
)
@pytest.mark.parametrize("configuration", covering_set(), ids=str)
def test_every_token_is_that_of_plain_decoding(
    model: Model, plain: Plain, configuration: Configuration, sampling: str
) -> None:
    prompts, tokens = SIZES[sampling]
    found = compare(model, configuration, sampling, 0, tokens, plain(configuration.kv, sampling))
    assert found["tokens"] == prompts * tokens * (1 + configuration.warm)
    assert found["identical"] == found["tokens"]
    assert found["drafted"] > 0  # and the configuration did what it says
    if configuration.warm and not configuration.preempted:
        assert found["cached_tokens"] > 0
    if configuration.preempted:
        assert found["preemptions"] > 0


def test_a_single_other_token_is_found(model: Model, plain: Plain) -> None:
    answers = [list(answer) for answer in plain("bf16", "mixed")]
    answers[5][20] += 1
    found = compare(model, covering_set()[-1], "mixed", 0, SIZES["mixed"][1], answers)
    assert found["tokens"] - found["identical"] == 1


def test_sampled_answers_are_not_the_greedy_ones(model: Model, plain: Plain) -> None:
    """Of eight prompts, two of each kind, four are sampled; where a text leaves no choice, these are alike too."""
    greedy = model.alone("bf16", "greedy", 0, 8, SIZES["mixed"][1])
    alike = [one == other for one, other in zip(greedy, plain("bf16", "mixed"), strict=False)]
    assert all(alike[place] for place in (0, 2, 5, 7))
    assert not all(alike[place] for place in (1, 3, 4, 6))
