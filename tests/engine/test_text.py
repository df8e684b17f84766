"""Text comes out as soon as it is sure: characters whole, and nothing of a stop string."""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from stoker.demo import EMBEDDED
from stoker.engine.text import TextStream
from tests.support.tokenizer import write_byte_tokenizer

SPECIAL = 256  # the first special token of `tokenizer`


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes: every character is a token, every accented one two."""
    with tempfile.TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder))
        return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, text: str, stops: Sequence[str]) -> tuple[list[str], str | None]:
    """What is shown after each token and at the end, up to a stop."""
    stream = TextStream(tokenizer, stops)
    shown = []
    for token in tokenizer.encode(text).ids:
        shown.append(stream.push(token))
        if stream.stopped is not None:
            break
    return [*shown, stream.flush()], stream.stopped


def test_halves_of_a_character_are_held_back(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "aé!", []) == (["a", "", "é", "!", ""], None)


def test_what_could_begin_a_stop_string_waits_until_it_is_decided(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "a\n\nb", ["\n\nUser"]) == (["a", "", "", "\n\nb", ""], None)
    assert pieces(tokenizer, "a\n\nUser", ["\n\nUser"]) == (["a", *[""] * 6, ""], "\n\nUser")
    assert pieces(tokenizer, "a\n\nUs", ["\n\nUser"]) == (["a", "", "", "", "", "\n\nUs"], None)  # the text ended first


def test_a_false_start_does_not_hide_the_real_one(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, "xaaab!", ["aab"])[0]) == "xa"
    assert pieces(tokenizer, "ababac", ["abac"]) == (["", "", "", "ab", "", "", ""], "abac")


def test_the_stop_that_is_complete_first_counts(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "one two", ["two", "ne"])[1] == "ne"
    assert pieces(tokenizer, "abc", ["abc", "ab"]) == (["", "", ""], "ab")


def test_a_stop_that_ends_while_none_may_is_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["ab"])
    shown = [stream.push(token, may_stop=place >= 3) for place, token in enumerate(tokenizer.encode("abaab").ids)]
    assert "".join(shown) == "aba"
    assert stream.stopped == "ab"


def test_pieces_make_up_the_decoded_text_whatever_the_tokens(tokenizer: Tokenizer) -> None:
    """Random bytes are mostly no valid UTF-8."""
    for seed in range(200):
        rng = random.Random(seed)
        tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        stream = TextStream(tokenizer, ["\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd!"])
        text = "".join([*(stream.push(token) for token in tokens), stream.flush()])
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)


class Counting:
    """A tokenizer that counts the tokens it is made to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.decoded = tokenizer, 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize(
    ("character", "part"),
    [("€", slice(1)), ("€", slice(2)), ("€", slice(1, 2)), ("😀", slice(3)), ("😀", slice(1, 4)), ("é", slice(1))],
)
@pytest.mark.parametrize("between", [[], [SPECIAL]])
def test_half_characters_without_end_cost_the_same_for_every_token(
    tokenizer: Tokenizer, character: str, part: slice, between: list[int]
) -> None:
    halves = tokenizer.encode(character).ids[part] + between
    tokens = halves * (20_000 // len(halves))
    counting = Counting(tokenizer)
    stream = TextStream(counting, ["no such thing"])
    text = "".join([*map(stream.push, tokens), stream.flush()])
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert counting.decoded < 15 * len(tokens)


def test_special_tokens_without_end_cost_the_same_for_every_token(tokenizer: Tokenizer) -> None:
    """They have no text, and a character may go on behind them."""
    first, *rest = tokenizer.encode("€").ids
    counting = Counting(tokenizer)
    stream = TextStream(counting)
    assert "".join(map(stream.push, [first, *[SPECIAL] * 20_000, *rest])) == "€"
    assert counting.decoded < 15 * 20_000


def test_random_tokens_of_many_bytes_come_out_as_they_are_decoded_at_once() -> None:
    """The demo's tokens have one byte to many, halves of characters and special tokens among them."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    halves = [token for token in range(size) if "\ufffd" in tokenizer.decode([token])]
    for seed in range(300):
        rng = random.Random(seed)
        tokens = [
            rng.choice(halves) if rng.random() < 0.8 else rng.randrange(size) for _ in range(rng.randrange(1, 120))
        ]
        stream = TextStream(tokenizer)
        text = "".join([*map(stream.push, tokens), stream.flush()])
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
