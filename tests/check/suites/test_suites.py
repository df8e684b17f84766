"""Suites are seeded, new seeds bring new items of the same mix, and every reference answer passes its own checker."""

import json
from collections import Counter

import pytest

from stoker.check import code_sandbox
from stoker.check.checkers import CHECKERS, Reply, judge
from stoker.check.items import Item
from stoker.check.suites import QUICK_TOKENS, SUITES, Suite, draw, pool
from stoker.check.suites.number_words import in_words

ALL = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)


@ALL
def test_a_seed_always_gives_the_same_items_and_another_gives_others(suite: Suite):
    first, again, other = suite.make("1", 40), suite.make("1", 40), suite.make("2", 40)
    assert first == again
    assert [item.id for item in first] == [item.id for item in other]
    asked = {json.dumps([item.messages, item.tools, item.expect]) for item in first}
    assert len(asked) == 40
    shared = [item for item in other if json.dumps([item.messages, item.tools, item.expect]) in asked]
    assert len(shared) <= 2, "few items repeat: topics of texts to write are few"
    assert Counter(item.kind for item in first) == Counter(item.kind for item in other)
    mean = [sum(item.cost for item in items) / 40 for items in (first, other)]
    assert mean[0] == pytest.approx(mean[1], rel=0.1)


@ALL
def test_the_pool_is_as_large_as_promised_and_its_checkers_exist(suite: Suite):
    items = suite.make("1", suite.full)
    assert len({item.id for item in items}) == suite.full
    assert all(item.checker in CHECKERS and item.suite == suite.name and item.max_tokens > 0 for item in items)
    assert all(item.cost <= item.max_tokens for item in items)


def answer(item: Item) -> Reply:
    """What a flawless model says."""
    if item.checker == "tool_calls":
        calls = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in item.expect]
        return Reply(text="" if calls else "Lisbon.", calls=calls)
    if item.checker == "json_fields":
        return Reply(text=json.dumps(item.expect, ensure_ascii=False))
    return Reply(text=f"Let me see.\nAnswer: {item.expect}" if item.checker == "number" else f"It is {item.expect}.")


@pytest.mark.parametrize("name", ["invoices", "tools", "arithmetic", "long context"])
def test_a_right_answer_passes_and_a_wrong_one_does_not(name: str):
    suite = next(suite for suite in SUITES if suite.name == name)
    for item in suite.make("3", 48):
        assert judge(item.checker, item.expect, answer(item)).passed, item
        assert not judge(item.checker, item.expect, Reply(text="")).passed
        other = next(each for each in suite.make("4", 48) if each.id == item.id)
        if item.expect != other.expect:
            assert not judge(item.checker, item.expect, answer(other)).passed, item


def test_what_an_invoice_says_is_in_its_text():
    for item in next(suite for suite in SUITES if suite.name == "invoices").make("5", 96):
        text = item.messages[0]["content"]
        assert item.expect["invoice_number"] in text
        assert item.expect["seller_tax_number"] in text
        assert item.expect["seller"] in text
        assert item.expect["buyer"] in text
        assert all(line["description"] in text for line in item.expect["items"])
        total = sum(line["total"] for line in item.expect["items"])
        assert item.expect["net"] == pytest.approx(total)
        assert item.expect["total"] == pytest.approx(item.expect["net"] + item.expect["vat"])
        assert item.expect["due_date"] > item.expect["issue_date"]


@pytest.mark.skipif(bool(code_sandbox.unavailable()), reason="code cannot be confined here")
def test_a_solution_of_generated_code_runs_in_the_sandbox():
    items = next(suite for suite in SUITES if suite.name == "code").make("6", 10)
    item = next(item for item in items if item.kind == "filtered sum")
    words = item.messages[0]["content"].replace(".", " ").split()
    by, above = int(words[words.index("divisible") + 2]), int(words[words.index("greater") + 2])
    name = item.expect["function"]
    good = f"def {name}(values):\n    return sum(v * v for v in values if v % {by} == 0 and v > {above})"
    assert judge("python", item.expect, Reply(text=f"Here:\n```python\n{good}\n```")).passed
    bad = judge("python", item.expect, Reply(text=f"```python\n{good.replace('v * v', 'v')}\n```"))
    assert not bad.passed
    assert 0 < bad.score < 1
    assert name in bad.why


def test_quick_fits_its_tokens_and_is_smaller_than_the_pools():
    items = draw("quick", "1")
    assert 0.85 * QUICK_TOKENS < sum(item.cost for item in items) <= QUICK_TOKENS
    counts, full = Counter(item.suite for item in items), Counter(item.suite for item in pool("full", "1"))
    assert all(0 < counts[name] < full[name] for name in full)
    assert [item.id for item in draw("quick", "1")] == [item.id for item in items]
    assert len(draw("kie", "1")) >= 200
    assert Counter(item.suite for item in draw("quick", "1", 30))["invoices"] == 30


@pytest.mark.parametrize(
    ("number", "language", "words"),
    [
        (22, "hu", "huszonkettő"),
        (200, "hu", "kétszáz"),
        (1848, "hu", "ezernyolcszáznegyvennyolc"),
        (2345, "hu", "kétezer-háromszáznegyvenöt"),
        (10, "hu", "tíz"),
        (120, "hu", "százhúsz"),
        (101, "de", "einhunderteins"),
        (2316, "de", "zweitausenddreihundertsechzehn"),
        (71, "de", "einundsiebzig"),
        (71, "fr", "soixante et onze"),
        (80, "fr", "quatre-vingts"),
        (91, "fr", "quatre-vingt-onze"),
        (99, "fr", "quatre-vingt-dix-neuf"),
        (200, "fr", "deux cents"),
        (1999, "fr", "mille neuf cent quatre-vingt-dix-neuf"),
        (21, "fr", "vingt et un"),
        (90, "fr", "quatre-vingt-dix"),
        (77, "fr", "soixante-dix-sept"),
        (70, "fr", "soixante-dix"),
        (100, "es", "cien"),
        (116, "es", "ciento dieciséis"),
        (2555, "es", "dos mil quinientos cincuenta y cinco"),
        (5022, "pl", "pięć tysięcy dwadzieścia dwa"),
        (3411, "pl", "trzy tysiące czterysta jedenaście"),
        (1000, "pl", "tysiąc"),
        (1100, "es", "mil cien"),
    ],
)
def test_numbers_in_words(number: int, language: str, words: str):
    assert in_words(number, language) == words


def test_numbers_in_words_are_all_different():
    for language in ("hu", "de", "fr", "es", "pl"):
        assert len({in_words(number, language) for number in range(1, 10_000)}) == 9_999
