"""Open-vocabulary sources: whatever is asked for can be copied from the prompt, requests single out one tool among
confusable ones, and no name that is held out elsewhere is given away."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
from training.data import calls, coined_calls, coined_invoices, coined_notes, names, words
from training.data.build import GENERATORS, TOKENIZER_SOURCES, generated
from training.data.invoice_parts import CURRENCIES, HELD_LINES, HELD_ROWS, KEYS, MONEY
from training.data.sample import Chat, Split
from training.data.styles import line_style, row_style
from training.data.tool_parts import HELD_VERBS, VERBS

from stoker.demo import EMBEDDED
from training import tokenizer as tokenizers

COINED = ("coined_notes", "coined_invoices", "coined_calls")
NEW = (*COINED, "calls_confusable")
DOCUMENTS = 2000
HELD = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(map(re.escape, names.HELD_NAMES), key=len, reverse=True))})(?!\w)")


def held_names_in(texts: Iterable[str]) -> set[str]:
    return {found for text in texts for found in HELD.findall(words.spoken(text))}


@cache
def held_names_of_earlier_sources() -> set[str]:
    return held_names_in(text for source in TOKENIZER_SOURCES for text in generated(source, "train", 400))


@cache
def chats(source: str) -> list[Chat]:
    made = [GENERATORS[source][0]("train", index) for index in range(DOCUMENTS)]
    assert all(isinstance(chat, Chat) for chat in made)
    return made  # type: ignore[return-value]


def test_the_word_lists_hold_nothing_that_is_held_out() -> None:
    assert len(names.VERBS) >= 80
    assert len(names.NOUNS) >= 150
    spoken = {word for also in names.ALSO_SAID.values() for word in also.split()}
    assert not {*names.VERBS, *names.NOUNS, *names.ADJECTIVES, *spoken} & names.HELD_WORDS
    assert not {also.capitalize() for also in names.ALSO_SAID.values()} & {
        w for ways in HELD_VERBS.values() for w in ways
    }
    assert set(names.ALSO_SAID) <= set(names.VERBS)


def test_the_held_names_of_every_generator_are_known_here() -> None:
    assert {
        "bill ref",
        "pay by",
        "végösszeg",
        "wingspan",
        "parcel locker",
        "hand over",
        "deliver to",
    } <= names.HELD_NAMES


def test_unseen_names_have_words_of_their_own() -> None:
    for lists in (names.SPLIT_VERBS, names.SPLIT_NOUNS):
        assert not set(lists["train"]) & set(lists["unseen"])
        assert set(lists["train"]) == set(lists["known"])


def test_a_coined_word_is_never_a_held_one() -> None:
    """words.coined does make "tide" and "rate" now and then."""
    rng = words.rng_for("coined words")
    assert {words.coined(rng).lower() for _ in range(200_000)} & names.HELD_WORDS
    assert not {names.coined(rng) for _ in range(200_000)} & names.HELD_WORDS


def test_spellings_of_a_name_are_read_back_as_its_words() -> None:
    for spell in (names.snake, names.camel, names.kebab, names.sentence, names.title):
        assert words.spoken(spell(("silver", "tarok", "kettle"))) == "silver tarok kettle"


@pytest.mark.parametrize("source", NEW)
def test_new_sources_give_away_no_held_name(source: str) -> None:
    """Some are everyday words ("each", "paint roller"); those the earlier sources use as well."""
    assert held_names_in(generated(source, "train", DOCUMENTS)) <= held_names_of_earlier_sources()


def coined_names(chat: Chat) -> set[str]:
    """Keys, tools, arguments and facts that are not ordinary ones."""
    found: set[str] = set()
    for offered in chat.tools:
        found |= {offered["function"]["name"], *offered["function"]["parameters"]["properties"]}
    for message in chat.messages:
        if message["role"] == "tool" or (message["role"] == "assistant" and message["content"].startswith("{")):
            found |= set(json.loads(message["content"]))
    return found - {key for keys in KEYS.values() for key in keys}


@pytest.mark.parametrize("source", COINED)
def test_no_word_of_a_coined_name_is_held_out(source: str) -> None:
    for chat in chats(source):
        assert not {word for name in coined_names(chat) for word in words.spoken(name).split()} & names.HELD_WORDS


@pytest.mark.parametrize("source", COINED)
def test_names_are_hardly_ever_met_twice(source: str) -> None:
    met = [name for chat in chats(source) for name in coined_names(chat)]
    assert len(set(met)) > 0.6 * len(met)


def stands_by(label: str, value: str, text: str) -> bool:
    """Is the value printed right after the label, or before it in brackets?"""
    label, value, text = words.spoken(label), words.spoken(value), words.spoken(text)
    after = rf"(?<!\w){re.escape(label)}(?: is | was |\W+){re.escape(value)}"
    return re.search(after, text) is not None or f"{value} ({label})" in text


def test_every_note_can_be_copied() -> None:
    for chat in chats("coined_notes"):
        question, answer = (message["content"] for message in chat.messages)
        said = {True: "yes", False: "no"}
        for key, value in json.loads(answer).items():
            assert key in question
            assert stands_by(key, said[value] if isinstance(value, bool) else str(value), question)


def test_an_explained_key_holds_the_value_of_its_label() -> None:
    checked = 0
    for chat in chats("coined_invoices"):
        question, answer = (message["content"] for message in chat.messages)
        if not re.search("(?:these keys|stand for|writing|kulcsokkal)[: ].* for ", question):
            continue
        for key, value in json.loads(answer).items():
            explained = re.search(rf"(?<![\w-]){re.escape(key)} for (.+?)(?:, |\.\n|\.$)", question, re.MULTILINE)
            if explained and isinstance(value, str) and explained[1] != "the currency":
                assert stands_by(explained[1], value, question)
                checked += 1
    assert checked > 100


def test_a_key_spelled_as_its_label_holds_the_value_of_that_label() -> None:
    right = wrong = 0
    for chat in chats("coined_invoices"):
        question, answer = (message["content"] for message in chat.messages)
        if re.search("these keys: [^,.]* (?:for|=|as|->) |stand for: |, writing |ezekkel a kulcsokkal", question):
            continue
        for key, value in json.loads(answer).items():
            if key in coined_names(chat) and isinstance(value, str) and value not in CURRENCIES:
                shared = stands_by(key, value, question)
                right, wrong = right + shared, wrong + (not shared)
    assert wrong < 0.3 * right  # those that only resemble their label


def test_every_invoice_can_be_copied() -> None:
    for chat in chats("coined_invoices"):
        question, answer = (message["content"] for message in chat.messages)
        values = json.loads(answer)
        rows = [row for value in values.values() if isinstance(value, list) for row in value]
        for key, value in [*values.items(), *(pair for row in rows for pair in row.items())]:
            assert key in question
            if isinstance(value, float):
                assert any(write(round(100 * value)) in question for write in MONEY.values())
            elif not isinstance(value, list) and value not in CURRENCIES:
                assert str(value) in question  # a currency may be there by its sign


@pytest.mark.parametrize("source", ["coined_calls", "calls_confusable"])
def test_every_argument_is_said_in_the_request(source: str) -> None:
    def said(value: Any) -> list[str]:
        return value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else str(value)]

    for chat in chats(source):
        for request, message in zip(chat.messages, chat.messages[1:], strict=False):
            for call in message.get("tool_calls", []):
                for value in call["function"]["arguments"].values():
                    assert all(part in request["content"] for part in said(value))


def described(chat: Chat) -> list[tuple[str, str]]:
    """Verb and thing of every tool on offer."""
    parts = [offered["function"]["description"].partition(" ") for offered in chat.tools]
    return [(verb, thing) for verb, _, thing in parts]


@pytest.mark.parametrize(("source", "alone"), [("coined_calls", 1), ("calls_confusable", 0)])
def test_tools_on_offer_share_verbs_and_things_and_yet_differ(source: str, alone: int) -> None:
    sizes = set()
    for chat in chats(source):
        tools = described(chat)
        sizes.add(len(tools))
        assert len(set(tools)) == len(tools)
        unlike = [t for t in tools if not any(t != other and (t[0] == other[0] or t[1] == other[1]) for other in tools)]
        assert len(unlike) <= alone
    assert sizes == ({2, 3, 4, 5} if alone else {2, 3, 4})


def test_a_request_names_the_thing_and_the_verb_of_the_tool_it_wants() -> None:
    """The verb as it is, or in one of the ways it is also said."""
    for index in range(500):
        chat = coined_calls.single_turn("train", index)
        request, name = chat.messages[0]["content"], chat.messages[1]["tool_calls"][0]["function"]["name"]
        verb, thing = next(d for d, t in zip(described(chat), chat.tools, strict=True) if t["function"]["name"] == name)
        assert thing in request
        known = VERBS.get(verb.lower(), ())
        ways = [verb.lower(), names.ALSO_SAID.get(verb.lower(), verb.lower()), *(way.lower() for way in known)]
        assert " ezt: " in request or any(way in request.lower() for way in ways)


def test_confusable_conversations_are_mostly_of_three_turns_and_sometimes_hungarian() -> None:
    turns = [[m["content"] for m in chat.messages if m["role"] == "user"] for chat in chats("calls_confusable")]
    assert sum(len(said) == 3 for said in turns) > 0.45 * DOCUMENTS
    hungarian = sum(" ezt: " in text for said in turns for text in said)
    assert 0.15 < hungarian / sum(map(len, turns)) < 0.35


def test_sometimes_no_tool_fits() -> None:
    refused = [chat for chat in chats("coined_calls") if "I have no tool for that" in str(chat.messages)]
    assert 0.02 < len(refused) / DOCUMENTS < 0.25
    for chat in refused:
        things = {thing for _, thing in described(chat)}
        for message in chat.messages:
            if message["content"].startswith("I have no tool"):
                assert re.split(r"handles an? ", message["content"])[1][:-1] not in things


def test_styles_put_together_are_never_the_held_ones() -> None:
    rng = words.rng_for("styles")
    lines = {line_style(rng)("Label", "value") for _ in range(5000)}
    rows = {row_style(rng)(1, "name", "2", "3.00", "6.00") for _ in range(5000)}
    assert len(lines) > 300
    assert len(rows) > 300
    assert not lines & {style("Label", "value") for style in HELD_LINES.values()}
    assert not rows & {style(1, "name", "2", "3.00", "6.00") for style in HELD_ROWS.values()}


def test_some_keys_are_explained_and_some_only_resemble_their_label() -> None:
    kinds = {"explained": 0, "spelled": 0, "resembling": 0}
    for chat in chats("coined_invoices"):
        question, answer = (message["content"] for message in chat.messages)
        fresh = [key for key in json.loads(answer) if key in coined_names(chat)]
        shown = words.spoken(question.replace(", ".join(json.loads(answer)), ""))
        if any(f"{key} for " in question or f"{key} = " in question or f"as {key}" in question for key in fresh):
            kinds["explained"] += 1
        elif fresh:
            kinds["spelled" if all(words.spoken(key) in shown for key in fresh) else "resembling"] += 1
    assert min(kinds.values()) > 0.05 * DOCUMENTS


@pytest.mark.parametrize("source", NEW)
def test_nearly_every_document_fits_a_row(source: str) -> None:
    tokenizer = tokenizers.load(EMBEDDED)
    lengths = [len(tokenizer.encode(text).ids) for text in generated(source, "train", 300)]
    assert np.mean(np.array(lengths) > 1024) < 0.08


@pytest.mark.parametrize("make", [coined_notes.make, coined_invoices.make, coined_calls.make, calls.confusable])
@pytest.mark.parametrize("split", ["train", "known", "unseen"])
def test_a_document_depends_on_split_and_index_alone(make: Callable[[Split, int], Chat], split: Split) -> None:
    assert make(split, 7) == make(split, 7)
    assert make(split, 7) != make(split, 8)
