"""Texts in pieces have the token ids of the whole."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from stoker.demo import EMBEDDED
from stoker.engine import text_pieces
from stoker.engine.text_pieces import PATTERNS, TextPieces, can_be_cut, cut

WORDS = [
    "the", " the", "I'll", "'S", "don't", "naïve", "e\u0301", "\u0301", "漢字", "12", "3.5", "  ", "\n", "\r\n", " \n",
    "\t", "<think>", "</think>", "<|im_end|>", "<|im_start|>user", "_", "-", "...", "a b", " a", "Z", "\u00a0", "🙂",
]  # fmt: skip


def tokenizer_of(pattern: str) -> Tokenizer:
    """The embedded one, its words found by another pattern."""
    found = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    found.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pieces_have_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.setattr(text_pieces, "LEAST", 1)
    tokenizer = tokenizer_of(pattern)
    pieces = TextPieces(tokenizer)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=40).map("".join))
    def check(text: str) -> None:
        assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids

    check()
    assert len(cut("one two, three four")) == 3


def test_a_text_that_grows_is_encoded_from_its_last_piece_on(monkeypatch: pytest.MonkeyPatch) -> None:
    words = random.Random(1).choices(["apple", "pear", "plum,", "fig\n"], k=8000)
    text = " ".join(words)
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    pieces = TextPieces(tokenizer)
    encoded: list[int] = []
    inner = TextPieces._encode

    def noted(self: TextPieces, texts: list[str]) -> Any:
        encoded.append(sum(map(len, texts)))
        return inner(self, texts)

    monkeypatch.setattr(TextPieces, "_encode", noted)
    for grown in (text, text + " and more of it", text[:20_000]):
        assert pieces.encode(grown) == tokenizer.encode(grown, add_special_tokens=False).ids
    first, second, third = encoded
    assert first == len(text)
    assert second < 2 * text_pieces.LEAST
    assert third < 2 * text_pieces.LEAST


def test_no_more_is_remembered_than_there_is_room_for() -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    pieces = TextPieces(tokenizer, kept=3 * text_pieces.LEAST)
    for seed in range(4):
        text = " ".join(random.Random(seed).choices(["apple", "pear", "plum"], k=4000))
        assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
    assert sum(map(len, pieces._known)) <= 3 * text_pieces.LEAST
    assert len(pieces._known) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"model": {"type": "Unigram", "dropout": None}},
        {"truncation": {"max_length": 5}},
        {"added_tokens": [{"content": "word", "lstrip": False, "rstrip": False, "single_word": False}]},
        {"added_tokens": [{"content": "<a b>", "lstrip": False, "rstrip": False, "single_word": False}]},
        {"added_tokens": [{"content": "<a>", "lstrip": True, "rstrip": False, "single_word": False}]},
    ],
)
def test_other_tokenizers_encode_texts_as_a_whole(change: dict[str, Any]) -> None:
    described = json.loads(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).to_str())
    assert can_be_cut(described)
    assert not can_be_cut(described | change)
