"""Checkers accept what is right however it is written, and nothing else; they say what was wrong."""

import json

import pytest

from stoker.check.checkers import Reply, judge
from stoker.check.language import language_of


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("Answer: 1,234.50", True),
        ("Answer: 1 234,5", True),
        ("1.234,5", True),
        ("first 7, then\nAnswer: **1234.5**", True),
        ("answer: 1234.5 euros", True),
        ("1234.6", False),
        ("twelve", False),
        ("Answer: -1234.5", False),
        ("1,234", False),
        ("It is 1234.5.", True),
        ("", False),
    ],
)
def test_numbers(said, right):
    assert judge("number", 1234.5, Reply(text=said)).passed is right


def test_numbers_with_thousands_and_signs():
    assert judge("number", 12_345, Reply(text="12,345")).passed
    assert judge("number", -7, Reply(text="−7")).passed
    assert judge("number", 27, Reply(text="3 + 24 = 27")).passed


def test_json_counts_every_field_and_says_which_is_wrong():
    wanted = {"a": "Kőszeg Kft.", "b": 3.5, "items": [{"n": 1}, {"n": 2}]}
    assert judge("json_fields", wanted, Reply(text=f"```json\n{json.dumps(wanted)}\n```")).passed
    assert judge("json_fields", wanted, Reply(text='{"a":"kőszeg  kft.","b":3.502,"items":[{"n":1},{"n":2.0}]}')).passed
    mark = judge("json_fields", wanted, Reply(text='{"a":"Kőszeg Kft.","b":"3.5","items":[{"n":1}]}'))
    assert mark.score == pytest.approx(2 / 4)
    assert "b is" in mark.why
    assert "items[1] is no object" in mark.why
    assert judge("json_fields", wanted, Reply(text="Sure! {")).score == 0
    assert judge("json_fields", wanted, Reply(text=json.dumps({**wanted, "c": 1}))).score == pytest.approx(0.8)
    assert judge("json_fields", wanted, Reply(text="[]")).score == 0
    assert not judge("json_fields", {"a": 1}, Reply(text='{"a": true}')).passed


def call(name: str, **arguments: object) -> dict[str, str]:
    return {"name": name, "arguments": json.dumps(arguments)}


def test_tool_calls_in_any_order_and_no_others():
    wanted = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": "a"}}]
    assert judge("tool_calls", wanted, Reply(calls=[call("g", y="a"), call("f", x=1)])).passed
    assert judge("tool_calls", wanted, Reply(calls=[call("f", x=1)])).score == 0.5
    assert judge("tool_calls", wanted, Reply(calls=[call("f", x=2), call("g", y="a")])).score == pytest.approx(0.75)
    assert not judge("tool_calls", wanted, Reply(calls=[call("g", y="a"), call("f", x=1), call("f", x=1)])).passed
    assert not judge("tool_calls", wanted, Reply(calls=[call("g", y="a", z=1), call("f", x=1)])).passed
    assert not judge("tool_calls", wanted, Reply(calls=[call("g", y="a"), {"name": "f", "arguments": '{"x": '}])).passed
    twice = [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]
    assert judge("tool_calls", twice, Reply(calls=[call("f", x=2), call("f", x=1)])).passed
    assert judge("tool_calls", [], Reply(text="No tool fits.")).passed
    assert not judge("tool_calls", [], Reply(text="", calls=[call("f", x=1)])).passed
    assert not judge("tool_calls", [], Reply(text="")).passed


def test_texts():
    assert judge("contains", "1234-AB", Reply(text="The code is 1234-ab.")).passed
    assert not judge("contains", "1234-AB", Reply(text="The code is 1234-ABC.")).passed
    assert judge("contains", ["a", "b"], Reply(text="a c")).score == 0.5
    assert judge("exact", "yes", Reply(text=" yes\n")).passed
    assert judge("regex", r"\d{3}", Reply(text="123")).passed
    assert judge("choice", "C", Reply(text="I say C.")).passed
    assert not judge("choice", "C", Reply(text="None of them")).passed


@pytest.mark.parametrize(
    ("rule", "kept", "broken"),
    [
        ({"rule": "lines", "count": 2}, "a\nb", "a\n\nb"),
        ({"rule": "bullets", "count": 2}, "- a\n- b", "* a\n* b"),
        ({"rule": "words", "most": 3}, "a b c", "a b c d"),
        ({"rule": "sentences", "count": 2}, "One. Two!", "One. Two. Three."),
        ({"rule": "lower case"}, "all small", "Not all"),
        ({"rule": "upper case"}, "LOUD 3", "Loud"),
        ({"rule": "without", "text": ","}, "a b", "a, b"),
        ({"rule": "word", "word": "paper", "times": 2}, "Paper on paper", "paper papers"),
        ({"rule": "begins", "text": "Note 1:"}, "Note 1: a", "note 1: a"),
        ({"rule": "ends", "text": "End."}, "a End.", "End. a"),
        ({"rule": "json keys", "keys": ["a", "b"]}, '{"b": "1", "a": ""}', '{"a": "1"}'),
        ({"rule": "quoted"}, '"text"', "text"),
        (
            {"rule": "language", "language": "hu"},
            "Ez a ház nem az, amit kerestünk.",
            "This is not the house that we saw.",
        ),
    ],
)
def test_rules(rule, kept, broken):
    assert judge("rules", [rule], Reply(text=kept)).passed
    assert judge("rules", [rule], Reply(text=broken)).why == f"broken: {rule['rule']}"
    assert judge("rules", [rule], Reply(text="")).score == 0


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("A házat télen azért kell felkészíteni, mert a hideg és a nedvesség kárt tehet benne.", "hu"),
        ("Glas verpackt man am besten in Papier und legt es dann in eine feste Kiste.", "de"),
        ("Il faut emballer le verre dans du papier et le mettre dans une boîte solide.", "fr"),
        ("El vidrio se embala en papel y se pone en una caja que no se mueva.", "es"),
        ("Szkło należy zawinąć w papier i włożyć do mocnego pudełka, aby się nie stłukło.", "pl"),
        ("Glass is wrapped in paper and put into a box that does not move.", "en"),
        ("123 456", ""),
        ("ok", ""),
        ("Брат и сестра ушли в поле рано утром", ""),
    ],
)
def test_languages(text, language):
    assert language_of(text) == language
