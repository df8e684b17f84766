"""A table made from text with known habits answers as they do, no likelier than they are, and says nothing twice."""

import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from training.config import TINY
from training.phrases import Collection, Text, answered, chances, foretold, hold_out, write

from stoker.speculate.phrases import Phrases, hashes_of
from training import phrases as command

END, GIVEN, VOCABULARY = 99, 20, 100


def texts(seed: int, count: int, own: int = 60) -> np.ndarray:
    """After 1 comes 2 nine times in ten; after 3 comes 4 four times in ten, after 8, 3 always 5; the rest is chance."""
    random, parts = np.random.default_rng(seed), []
    for _ in range(count):
        text = random.integers(10, 90, GIVEN).tolist()
        while len(text) < GIVEN + own:
            before, chance = tuple(text[-2:]), random.random()
            if before[1] == 1 and chance < 0.9:
                text.append(2)
            elif before == (8, 3):
                text.append(5)
            elif before[1] == 3 and chance < 0.4:
                text.append(4)
            elif chance < 0.3:
                text += [8, 3] if chance < 0.02 else [int(random.choice([1, 3]))]
            else:
                text.append(int(random.integers(10, 90)))
        parts += [text[: GIVEN + own], [END]]
    return np.concatenate(parts).astype("<u2")


def text_of(seed: int, count: int) -> Text:
    return Text.of(texts(seed, count), END, GIVEN)


def entry(entries: command.Entries, *context: int) -> tuple[int, float] | None:
    found = np.flatnonzero(entries.hashes == hashes_of(np.array([context]))[0])
    return (int(entries.tokens[found[0]]), float(entries.rates[found[0]])) if len(found) else None


def test_documents_end_at_the_first_end_that_was_written() -> None:
    tokens = np.array([END, 5, 6, 7, END, 1, 2, END, END, 1, 2, 3])
    text = Text.of(tokens, END, 2)
    assert list(zip(text.starts.tolist(), text.stops.tolist(), strict=True)) == [(0, 4), (5, 7)]
    assert text.places(2)[0].tolist() == [2, 3]
    assert text.before(np.array([2, 3]), 2).tolist() == [[END, 5], [5, 6]]


def test_what_a_text_repeats_of_itself_is_not_collected() -> None:
    phrase = [1, 2, 3, 4, 5]
    tokens = np.array([*phrase, 10, 11, 12, *phrase, 6, END, 12, 13, 14, *phrase, END])
    # what follows four tokens of the phrase is known from what was given; another document knows nothing of it
    text = Text.of(tokens, END, 6)
    assert text.news().tolist() == [6, 7, 8, 9, 10, 11, 21, 22]


def test_passages_that_overlap_are_held_out_together() -> None:
    novel = np.random.default_rng(1).integers(0, 90, 4000)
    starts = np.random.default_rng(2).integers(0, 4000 - GIVEN, 300)
    rows = [[*novel[start : start + GIVEN], 7, 7, END] for start in starts]
    own, held = hold_out(Text.of(np.concatenate(rows), END, GIVEN), 0.1, 1)
    assert 0.1 <= len(held.starts) / 300 < 0.2
    assert len(own.starts) > 150
    mine, his = (starts[part.starts // (GIVEN + 3)] for part in (own, held))
    assert np.abs(mine[:, None] - his).min() > GIVEN - command.OVERLAP


def test_habits_are_found_and_nothing_is_said_twice() -> None:
    entries = Collection(text_of(1, 400), VOCABULARY).choose(1000)
    token, rate = entry(entries, 1) or (0, 0.0)
    assert (token, round(rate, 1)) == (2, 0.9)
    token, rate = entry(entries, 3) or (0, 0.0)  # counted where the longer context does not answer
    assert (token, round(rate, 1)) == (4, 0.4)
    token, rate = entry(entries, 8, 3) or (0, 0.0)
    assert (token, rate > 0.98) == (5, True)
    # the token before tells nothing more, but for a few contexts that look as if it did
    said_twice = [before for before in range(10, 90) if entry(entries, before, 1) or entry(entries, before, 3)]
    assert len(said_twice) < 10


def test_chances_are_those_of_other_text(tmp_path: Path) -> None:
    """Few sightings make phrases of chance: in the text they come from they are right, elsewhere not."""
    own, held, other = text_of(1, 40), text_of(2, 60), text_of(3, 60)
    entries = Collection(own, VOCABULARY).choose(2000)
    path = tmp_path / "phrases.safetensors"
    write(path, entries, held, 100_000, VOCABULARY, command.LONGEST)
    phrases = Phrases.load(path, VOCABULARY)
    for chance, count, right in foretold(phrases, other):
        deviation = (chance * (1 - chance) / count) ** 0.5
        assert abs(right / count - chance) < 0.05 + 3 * deviation
    rates = entries.rates[answered(entries, own, own.news(), command.LONGEST)]
    assert rates.mean() > 0  # and the table answers


def test_the_file_answers_as_was_reckoned(tmp_path: Path) -> None:
    own, held = text_of(1, 80), text_of(2, 20)
    entries = Collection(own, VOCABULARY).choose(500)
    path = tmp_path / "phrases.safetensors"
    write(path, entries, held, 100_000, VOCABULARY, command.LONGEST)
    phrases, likely = Phrases.load(path, VOCABULARY), np.array(chances(entries, held, command.LONGEST), np.float32)
    places = held.news()
    for place, found in zip(places.tolist(), answered(entries, held, places, command.LONGEST), strict=True):
        expected = (int(entries.tokens[found]), float(likely[entries.classes[found]])) if found >= 0 else None
        assert phrases.next(held.tokens[place - 8 : place].tolist()) == expected


def test_the_command_writes_no_more_than_it_may(
    data: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tokens = texts(1, 500)
    tokens[tokens == END] = tokenizer.token_to_id("<|endoftext|>")
    for name, part in (("one", tokens[: 81 * 300]), ("two", tokens[81 * 300 :])):
        (tmp_path / f"{name}.xz").write_bytes(lzma.compress(part.tobytes()))
    shards = f"{tmp_path / 'one.xz'} {tmp_path / 'two.xz'}"
    out = tmp_path / "phrases.safetensors"
    options = f"--text {shards} --out {out} --given {GIVEN} --data {data} --shape tiny --bytes 1500"
    monkeypatch.setattr(sys, "argv", ["phrases", *options.split()])
    command.main()
    assert 1000 < out.stat().st_size <= 1500
    token, chance = Phrases.load(out, TINY.model.vocab_size).next([50, 1]) or (0, 0.0)
    assert token == 2
    assert chance == pytest.approx(0.9, abs=0.05)
    said = capsys.readouterr().out
    assert "450 passages to collect from, 50 held out" in said
    speeds = [float(line.split(": ")[1].split(" x")[0]) for line in said.splitlines() if " x plain" in line]
    assert len(speeds) == 2
    assert speeds[1] > 1.05 > speeds[0]
