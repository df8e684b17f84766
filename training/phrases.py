"""Collects the phrases a model often writes, from its own greedy text, as a table for the lookup drafter:

    python -m training.phrases --text build/training/shards/train/own_prose.xz --out DIR/phrases.safetensors

A context of a few tokens is worth an entry if its answer saves more steps than that of the next shorter kept context
would there, less the rows that either has verified in vain. A tenth of the passages is held out, and what overlaps
them is left out: how likely answers are, and what the table is good for, is measured there.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul
from pathlib import Path

import numpy as np

from stoker.sampling.settings import Sampling
from stoker.speculate.drafter import DraftRequest, accept
from stoker.speculate.lookup import LookupDrafter
from stoker.speculate.phrases import FACTOR, Phrases, hashes_of, save
from training import tokenizer as tokenizers
from training.batches import Marks, read_shard
from training.config import SHAPES
from training.own_text import PROMPT

LONGEST = 5  # tokens of a context
LEAST = 2  # times a context must have been seen
ROW = 0.24  # plain steps that one more row adds to a step
PRICE = 1.12 * ROW  # the same in tokens, at the speed that drafting is hoped to give
DOUBT = 2.0  # sightings that what the shorter context says is worth
ROUNDS = 2  # of choosing entries, counting what the others leave to them
LITTLE = 0.25  # tokens that an entry brings, however much room there is
EDGES = (0.12, 0.22, 0.32, 0.44, 0.58, 0.74, 0.9)  # between the classes of chances
TRUST = 20.0  # sightings in the held-out text that a class's rate in the collected text is worth
SHARE, OVERLAP = 0.1, 12  # of passages that is held out; tokens in a row that passages share if they overlap
FEWEST = 20  # passages that a table is made from
REPEATED = 4  # tokens that a text has written before: there the drafter looks back
BITS = 22  # of an entry in the file, about
REPORTED, DEPTH = 1000, 4  # held-out documents that the report is about, most drafts a step in it


@dataclass(frozen=True)
class Text:
    """Documents of tokens: `given` ones that the model did not write, then its own."""

    tokens: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    given: int

    @classmethod
    def of(cls, tokens: np.ndarray, end: int, given: int) -> "Text":
        """There is an `end` after each document; others may stand in what was given."""
        ends, bounds, start = np.flatnonzero(tokens == end), [], 0
        while (at := int(np.searchsorted(ends, start + given))) < len(ends):
            bounds.append((start, int(ends[at])))
            start = bounds[-1][1] + 1
        starts, stops = np.array(bounds, np.int64).reshape(-1, 2).T
        return cls(tokens.astype(np.int64), starts, stops, given)

    def part(self, chosen: np.ndarray) -> "Text":
        return Text(self.tokens, self.starts[chosen], self.stops[chosen], self.given)

    def documents(self) -> Iterator[tuple[list[int], list[int]]]:
        """What was given and what the model wrote, of each."""
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            middle = start + self.given
            yield self.tokens[start:middle].tolist(), self.tokens[middle:stop].tolist()

    def places(self, given: int) -> tuple[np.ndarray, np.ndarray]:
        """Of all tokens but the first `given` of each document, and the number of its document."""
        counts = self.stops - self.starts - given
        document = np.repeat(np.arange(len(counts)), counts)
        return (self.starts + given - np.cumsum(counts) + counts)[document] + np.arange(len(document)), document

    def news(self) -> np.ndarray:
        """Places of tokens that the model wrote and that do not follow a repetition of its text."""
        places, document = self.places(REPEATED)
        grams = _mixed(chain((self.tokens[places - size] for size in range(1, REPEATED + 1)), [document]))
        first = np.zeros(len(places), bool)
        first[np.unique(grams, return_index=True)[1]] = True
        return places[first & (places - self.starts[document] >= self.given)]

    def before(self, places: np.ndarray, size: int) -> np.ndarray:
        """The contexts [N, size] of these places."""
        return np.stack([self.tokens[places - back] for back in range(size, 0, -1)], axis=1)


def hold_out(text: Text, share: float, seed: int) -> tuple[Text, Text]:
    """-> what to collect from, and at least that share of the documents, whose passages overlap none of the former."""
    rows = text.starts[:, None] + np.arange(text.given - OVERLAP + 1)
    grams = _mixed(text.tokens[rows + place] for place in range(OVERLAP))
    order, held = np.random.default_rng(seed).permutation(len(rows)), np.zeros(len(rows), bool)
    for seeds in np.array_split(order, min(len(order), 1000)):
        if held.mean() >= share:
            break
        held |= np.isin(grams, grams[seeds]).any(axis=1)
    near = np.asarray(np.isin(grams, grams[held]).any(axis=1))
    return text.part(~near), text.part(held)


def _mixed(parts: Iterable[np.ndarray]) -> np.ndarray:
    """One number for several."""
    mixed = np.zeros(1, np.uint64)
    for part in parts:
        mixed = (mixed ^ (part.astype(np.uint64) + np.uint64(1))) * np.uint64(FACTOR)
        mixed ^= mixed >> np.uint64(32)  # upper bits into the lower ones, which a product keeps apart
    return mixed


@dataclass
class Level:
    """Contexts of one length: which one stands at each place (-1: none seen often enough), and what follows each."""

    at: np.ndarray
    somewhere: np.ndarray  # a place of each
    tokens: np.ndarray  # the likeliest next
    seen: np.ndarray
    right: np.ndarray  # of those seen


@dataclass(frozen=True)
class Choice:
    """By length of contexts: which are kept, how often their answer is right, and how many tokens each brings."""

    kept: list[np.ndarray]
    rates: list[np.ndarray]
    worth: list[np.ndarray]
    cover: np.ndarray  # length of the longest kept context at each place

    @property
    def size(self) -> int:
        return sum(int(kept.sum()) for kept in self.kept)


@dataclass(frozen=True)
class Entries:
    """Most useful ones first."""

    hashes: np.ndarray
    tokens: np.ndarray
    rates: np.ndarray  # how often the token came next in the collected text, with some doubt

    def first(self, count: int) -> "Entries":
        return Entries(self.hashes[:count], self.tokens[:count], self.rates[:count])

    @property
    def classes(self) -> np.ndarray:
        return np.searchsorted(EDGES, self.rates, side="right")


class Collection:
    """All contexts in a text of its own."""

    def __init__(self, text: Text, vocab_size: int, longest: int = LONGEST) -> None:
        self.text, self.vocab_size = text, vocab_size
        self.places = text.news()
        self.targets = text.tokens[self.places]
        self.levels: list[Level] = []
        at = np.zeros(len(self.places), np.int64)
        for size in range(1, longest + 1):
            there = np.flatnonzero(at >= 0)
            keys = at[there] * vocab_size + text.tokens[self.places[there] - size]
            _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
            number = np.where(counts >= LEAST, np.cumsum(counts >= LEAST) - 1, -1)
            at = np.full(len(at), -1, np.int64)
            at[there] = number[inverse]
            there = np.flatnonzero(at >= 0)
            somewhere = np.zeros(int(number.max(initial=-1)) + 1, np.int64)
            somewhere[at[there]] = there
            counts = np.zeros((3, len(somewhere)), np.int64)
            self.levels.append(Level(at.astype(np.int32), somewhere, *counts))

    def choose(self, count: int) -> Entries:
        """About that many contexts. What follows one is counted where no longer kept one stands."""
        cover = np.zeros(len(self.places), np.int8)
        for _ in range(ROUNDS):
            self._count(cover)
            low, high = LITTLE, 256.0  # tokens that an entry must bring
            while high - low > 0.02 * high:
                choice = self._choose(cover, (low + high) / 2)
                if abs(choice.size - count) <= 0.002 * count:
                    break
                low, high = ((low + high) / 2, high) if choice.size > count else (low, (low + high) / 2)
            cover = choice.cover
        self._count(cover)
        return self._entries(self._choose(cover, kept=choice.kept))

    def _count(self, cover: np.ndarray) -> None:
        for size, level in enumerate(self.levels, 1):
            free = np.flatnonzero((level.at >= 0) & (cover <= size))
            keys = np.sort(level.at[free].astype(np.int64) * self.vocab_size + self.targets[free])
            first = np.flatnonzero(np.diff(keys, prepend=-1))
            numbers, tokens = np.divmod(keys[first], self.vocab_size)
            counts = np.diff(first, append=len(keys))
            groups = np.flatnonzero(np.diff(numbers, prepend=-1))
            level.tokens, level.seen, level.right = np.zeros((3, len(level.somewhere)), np.int64)
            if len(groups):
                known = numbers[groups]
                best = np.maximum.reduceat(counts * self.vocab_size + tokens, groups)
                level.right[known], level.tokens[known] = np.divmod(best, self.vocab_size)
                level.seen[known] = np.add.reduceat(counts, groups)

    def _choose(self, cover: np.ndarray, least: float = 0.0, kept: Sequence[np.ndarray] = ()) -> Choice:
        """Contexts that bring at least that many tokens more than the shorter ones that are kept, or those given."""
        choice = Choice([], [], [], np.zeros_like(cover))
        answer, sure = np.full(len(cover), -1, np.int32), np.zeros(len(cover), np.float32)  # of the kept one so far
        for size, level in enumerate(self.levels, 1):
            free = np.flatnonzero((level.at >= 0) & (cover <= size))
            right = answer[free] == self.targets[free]
            others = np.bincount(level.at[free], weights=right, minlength=len(level.somewhere))
            shorter, same = sure[level.somewhere], answer[level.somewhere] == level.tokens
            weight = level.seen + DOUBT
            rates = (level.right + DOUBT * shorter * same) / weight
            without = np.where(shorter > PRICE, (others + DOUBT * shorter) / weight - PRICE, 0.0)
            worth = level.seen * (np.maximum(rates - PRICE, 0.0) - without)
            chosen = kept[size - 1] if kept else worth >= least
            there = np.flatnonzero(level.at >= 0)
            there = there[chosen[level.at[there]]]
            numbers = level.at[there]
            answer[there], sure[there], choice.cover[there] = level.tokens[numbers], rates[numbers], size
            choice.kept.append(chosen)
            choice.rates.append(rates)
            choice.worth.append(worth)
        return choice

    def _entries(self, choice: Choice) -> Entries:
        parts = []
        for size, level in enumerate(self.levels, 1):
            chosen = np.flatnonzero(choice.kept[size - 1] & (level.seen > 0))
            hashes = hashes_of(self.text.before(self.places[level.somewhere[chosen]], size))
            parts.append((hashes, level.tokens[chosen], choice.rates[size - 1][chosen], choice.worth[size - 1][chosen]))
        hashes, tokens, rates, worth = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(-worth, kind="stable")
        first = np.sort(np.unique(hashes[order], return_index=True)[1])  # of two with the same hash the better one
        order = order[first]
        return Entries(hashes[order], tokens[order], rates[order])


def answered(entries: Entries, text: Text, places: np.ndarray, longest: int) -> np.ndarray:
    """The entry that answers at each place, -1 where none does."""
    order = np.argsort(entries.hashes)
    hashes, found = entries.hashes[order], np.full(len(places), -1)
    for size in range(1, longest + 1):
        asked = hashes_of(text.before(places, size))
        at = np.minimum(np.searchsorted(hashes, asked), len(hashes) - 1)
        found = np.where(hashes[at] == asked, order[at], found)
    return found


def chances(entries: Entries, text: Text, longest: int) -> list[float]:
    """Of each class to be right, in a text that the entries were not collected from."""
    places = text.news()
    found = answered(entries, text, places, longest)
    places, found = places[found >= 0], found[found >= 0]
    right = entries.tokens[found] == text.tokens[places]
    claimed, classes = entries.rates[found], entries.classes[found]
    result = []
    for kind in range(len(EDGES) + 1):
        own = classes == kind
        guess = claimed[own].mean() if own.any() else (*EDGES, 1.0)[kind]
        result.append(float((right[own].sum() + TRUST * guess) / (own.sum() + TRUST)))
    return result


def write(path: Path, entries: Entries, held: Text, most: int, vocab_size: int, longest: int) -> None:
    """As many of the entries as fit into `most` bytes."""
    while True:
        likely = chances(entries, held, longest)
        size = save(path, entries.hashes, entries.tokens, entries.classes, likely, vocab_size, longest)
        if size <= most:
            return
        entries = entries.first(int(len(entries.hashes) * min(0.998, most / size)))


def foretold(phrases: Phrases, text: Text) -> list[tuple[float, int, int]]:
    """Chance (0: no answer), how many tokens of the model were answered with it, and how many of them rightly."""
    counts: dict[float, list[int]] = {}  # answered, right
    for given, own in text.documents():
        whole = given + own
        for place, came in enumerate(own, len(given)):
            token, chance = phrases.next(whole[max(0, place - phrases.longest) : place]) or (-1, 0.0)
            count = counts.setdefault(chance, [0, 0])
            count[0] += 1
            count[1] += token == came
    return [(chance, answered, right) for chance, (answered, right) in sorted(counts.items(), reverse=True)]


def speedup(drafter: LookupDrafter, text: Text) -> float:
    """Over plain decoding, if a row more costs ROW of a plain step and is verified where that seems to pay."""
    written = cost = 0.0
    for slot, (given, own) in enumerate(text.documents()):
        place = 1  # the first token comes with the prompt
        while place < len(own):
            depth = min(drafter.max_depth, len(own) - place - 1)
            draft = drafter.propose([DraftRequest(slot, (), given, own[:place], Sampling(), depth)])[0].first(depth)
            rows = sum(chance > PRICE for chance in accumulate(draft.confidence, mul))
            came = len(accept(draft.tokens[:rows], own[place : place + rows + 1]))
            place, written, cost = place + came, written + came, cost + 1.0 + ROW * rows
    return written / cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="shards that training.own_text wrote")
    parser.add_argument("--out", type=Path, required=True, help="phrases.safetensors in the directory of the model")
    parser.add_argument("--bytes", type=int, default=480_000, help="most that the file may have")
    parser.add_argument(
        "--given", type=int, default=PROMPT, help="tokens of each document that the model did not write"
    )
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a context")
    parser.add_argument("--data", type=Path, default=Path("build/training"))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    end = Marks.of(tokenizers.load(options.data / "tokenizer")).end_of_text
    tokens = np.concatenate([read_shard(path) for path in options.text])
    text = Text.of(tokens, end, options.given)
    if len(text.starts) < FEWEST:
        raise SystemExit(f"{len(text.starts)} passages are too few to collect from and to measure on; give {FEWEST}.")
    own, held = hold_out(text, SHARE, options.seed)
    print(f"{len(own.starts):,} passages to collect from, {len(held.starts):,} held out", flush=True)
    vocab_size = SHAPES[options.shape].model.vocab_size
    entries = Collection(own, vocab_size, options.longest).choose(options.bytes * 8 // BITS)
    write(options.out, entries, held, options.bytes, vocab_size, options.longest)
    phrases = Phrases.load(options.out, vocab_size)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes, {len(phrases):,} contexts")
    some = held.part(np.arange(min(REPORTED, len(held.starts))))
    rows = foretold(phrases, some)
    written = sum(count for _, count, _ in rows)
    print("chance   of the text   right")
    for chance, count, right in rows:
        print(f"{chance:6.2f} {count / written:13.3f} {right / count:7.3f}")
    print(f"foretold: {sum(right for *_, right in rows) / written:.3f} of {written:,} tokens")
    for name, table in (("text alone", None), ("text and phrases", phrases)):
        gain = speedup(LookupDrafter(DEPTH, table), some)
        print(f"drafted from {name}: {gain:.3f} x plain, if a row more costs {ROW} of a plain step")


if __name__ == "__main__":
    main()
