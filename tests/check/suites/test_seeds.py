"""A new seed makes new items that are as hard: the same kinds in the same numbers, as long, nothing known by heart."""

import json
import re
from collections import Counter
from itertools import combinations
from statistics import mean

import pytest

from stoker.check.items import Item
from stoker.check.suites import SUITES, Suite

SEEDS = ("1", "2", "another")
EVERY = pytest.mark.parametrize("suite", SUITES, ids=[suite.name for suite in SUITES])


def made(suite: Suite, seed: str) -> list[Item]:
    return suite.make(seed, suite.full)


def asked(item: Item) -> str:
    facts = item.filler.sentences if item.filler else []
    return json.dumps([item.messages, [tool["function"]["name"] for tool in item.tools], facts], ensure_ascii=False)


@EVERY
def test_every_seed_has_the_same_kinds_in_the_same_numbers(suite: Suite):
    shapes = [
        [(item.id, item.kind, item.checker, item.language, len(item.messages)) for item in found]
        for found in (made(suite, seed) for seed in SEEDS)
    ]
    places = [Counter((each[1], *each[3:]) for each in shape) for shape in shapes]
    assert places[0] == places[1] == places[2]
    checkers = [Counter(each[2] for each in shape) for shape in shapes]
    for one, other in combinations(checkers, 2):  # drawn, where a kind has several
        assert all(abs(one[name] - other[name]) <= 0.1 * suite.full for name in one | other)


@EVERY
def test_questions_and_answers_are_as_long(suite: Suite):
    for measure in (lambda item: len(asked(item)), lambda item: len(json.dumps(item.expect)), lambda item: item.cost):
        means = [mean(map(measure, made(suite, seed))) for seed in SEEDS]
        assert max(means) <= 1.12 * min(means) + 1, means


@EVERY
def test_no_question_of_one_seed_is_among_those_of_another(suite: Suite):
    """Where all is drawn; a short instruction may come again, and its answer is judged by rules."""
    for one, other in combinations((made(suite, seed) for seed in SEEDS), 2):
        shared = {asked(item) for item in one} & {asked(item) for item in other}
        assert len(shared) <= 0.02 * suite.full, sorted(shared)[:3]


@EVERY
def test_answers_cannot_be_known_by_heart(suite: Suite):
    """To give the answers of one seed to another's questions, place by place, scores next to nothing."""
    if suite.name in ("code", "instructions"):
        pytest.skip("answers are judged by running them and by rules, which the question states")
    one, other = made(suite, SEEDS[0]), made(suite, SEEDS[1])
    same = sum(
        a.expect == b.expect
        for a, b in zip(one, other, strict=True)
        if a.checker == b.checker and a.checker != "language" and a.expect != []
    )
    assert same <= 0.03 * suite.full


def test_names_are_coined():
    """Proper names in invoices of two seeds are hardly ever the same."""
    invoices = next(suite for suite in SUITES if suite.name == "invoices")
    names = [
        {re.sub(r"\W+", " ", str(item.expect["seller"])).strip() for item in made(invoices, seed)} for seed in SEEDS[:2]
    ]
    assert len(names[0]) > 0.95 * invoices.full
    assert len(names[0] & names[1]) <= 0.02 * invoices.full
