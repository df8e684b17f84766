"""How near one server's predictions are to another's on the same texts: KL divergence and the likeliest token.

Servers list only the likeliest tokens, so what is computed is a lower bound of the divergence; docs/check.md has the
formula. It finds a broken format with a hundred texts, where scores of answers need thousands.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from stoker.bench.target import Target
from stoker.check import statistics
from stoker.check.passages import passages
from stoker.check.predictions import (
    FORCED,
    PROBE,
    WAYS,
    Predictions,
    Prompt,
    Seen,
    Way,
    find_way,
    positions,
    token_ids,
)
from stoker.check.record import Closeness
from stoker.check.run import Watcher
from stoker.check.verdict import TOO_MANY_FAILED
from stoker.errors import BenchError

Token = TypeVar("Token", int, str, int | str)
TINY = 1e-9  # probability; what rounding leaves of a rest that is empty
ALL = "all"


class Gap(NamedTuple):
    """Of one position."""

    kl: float  # at least so many nats
    rest: float  # probability of the reference that was compared as one lump
    same: bool  # both find the same token likeliest


class Text(NamedTuple):
    """Sums over the positions of a text."""

    kl: float
    rest: float
    same: int
    tokens: int


@dataclass
class Near:
    """Rows by kind of text, the whole last; none, and a note, where the servers cannot be compared."""

    rows: list[Closeness] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def gap(reference: Mapping[Token, float], other: Mapping[Token, float], least: float) -> Gap:
    """A lower bound of KL(reference || other) from two lists of log-probabilities.

    Tokens that both list count one by one, the others as two lumps: those that only the reference lists, of which the
    other gives each at most `least`, its last listed value, and the rest. Lumps hide divergence and never make any.
    """
    shared = reference.keys() & other.keys()
    p_shared = math.fsum(math.exp(reference[token]) for token in shared)
    q_shared = math.fsum(math.exp(other[token]) for token in shared)
    kl = math.fsum(math.exp(reference[token]) * (reference[token] - other[token]) for token in shared)
    p_missed = math.fsum(math.exp(logprob) for token, logprob in reference.items() if token not in shared)
    p_rest, q_left = max(1.0 - p_shared - p_missed, 0.0), max(1.0 - q_shared, TINY)
    q_missed = q_left * p_missed / max(p_missed + p_rest, TINY)  # where the bound is lowest
    q_missed = min(q_missed, (len(reference) - len(shared)) * math.exp(least))
    kl += _term(p_missed, q_missed) + _term(p_rest, q_left - q_missed)
    same = max(reference, key=lambda token: reference[token]) == max(other, key=lambda token: other[token])
    return Gap(max(kl, 0.0), max(1.0 - p_shared, 0.0), same)


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, TINY)) if p > TINY else 0.0


def compared(reference: Predictions, other: Predictions) -> Text:
    """Over the positions that both were asked for."""
    found: list[Gap] = []
    for place in sorted(reference.keys() & other.keys()):
        ids = reference[place].has_ids and other[place].has_ids
        ours, theirs = reference[place].by(ids), other[place].by(ids)
        if ours and theirs:
            found.append(gap(ours, theirs, other[place].least))
    kl, rest = math.fsum(each.kl for each in found), math.fsum(each.rest for each in found)
    return Text(kl, rest, sum(each.same for each in found), len(found))


def row(kind: str, texts: Sequence[Text], max_kl: float, whole: bool = True) -> Closeness:
    """Means over tokens; the interval is that of texts drawn anew. Unless most texts were read nothing is close."""
    tokens = sum(text.tokens for text in texts)
    low, high = statistics.ratio_interval([text.kl for text in texts], [text.tokens for text in texts])
    return Closeness(
        kind=kind,
        texts=len(texts),
        tokens=tokens,
        kl=math.fsum(text.kl for text in texts) / tokens,
        low=low,
        high=high,
        top1=sum(text.same for text in texts) / tokens,
        rest=math.fsum(text.rest for text in texts) / tokens,
        verdict="worse" if low > max_kl else "close" if high <= max_kl and whole else "undecided",
    )


async def measure(
    targets: Sequence[Target], seed: str, per_kind: int, max_kl: float, streams: int, watcher: Watcher
) -> Near:
    """The first target's predictions against the second's."""
    texts = [(kind, text) for kind, found in passages(seed, per_kind).items() for text in found]
    ids = [await token_ids(target, PROBE) for target in targets]
    if all(ids) and ids[0] != ids[1]:
        return Near(notes=[_unlike(PROBE, *(len(each or ()) for each in ids))])
    known = all(ids)
    ways: list[Way] = []
    for target, own in zip(targets, ids, strict=True):
        way = await find_way(target, own if known and own else PROBE)
        if way is None:
            return Near(notes=[_mute(target, known)])
        ways.append(way)
    watcher.phase("closeness", len(texts))
    asker = _Asker(ways, known, seed, watcher)
    found = await _at_once(asker, texts, streams)
    notes = list(dict.fromkeys(asker.notes))
    if asker.unlike:
        return Near(notes=[asker.unlike])
    by_kind: dict[str, list[Text]] = {}
    for (kind, _), text in zip(texts, found, strict=True):
        if text is not None and text.tokens:
            by_kind.setdefault(kind, []).append(text)
    left = len(texts) - sum(map(len, by_kind.values()))
    if left:
        notes.append(f"Closeness: {left} of {len(texts)} texts were left out, since a request failed: {asker.failure}")
    for way in ways:
        if not way.whole:
            notes.append(
                f"Closeness: server {way.target.name} gives no log-probabilities of a prompt, so {FORCED} tokens of "
                "each text were asked for one by one."
            )
    if not by_kind:
        return Near(notes=notes)
    whole = left <= TOO_MANY_FAILED * len(texts)
    rows = [row(kind, texts_of, max_kl, whole) for kind, texts_of in by_kind.items()]
    everything = [text for texts_of in by_kind.values() for text in texts_of]
    return Near([*rows, row(ALL, everything, max_kl, whole)], notes)


class _Asker:
    """Asks both servers for a text, and compares."""

    def __init__(self, ways: Sequence[Way], known: bool, seed: str, watcher: Watcher) -> None:
        self.ways, self.known, self.seed, self.watcher = ways, known, seed, watcher
        self.unlike = self.failure = ""
        self.notes: list[str] = []

    async def __call__(self, text: str) -> Text | None:
        if self.unlike:
            return None
        try:
            seen = await self._seen(text)
        except (BenchError, KeyError, TypeError, ValueError) as error:
            self.failure = self.failure or str(error)[:300]
            return None
        finally:
            self.watcher.step()
        if seen is None:
            return None
        a, b = seen
        if a.tokens and b.tokens and not self.known and a.tokens != b.tokens:
            self.unlike = _unlike(text, len(a.tokens), len(b.tokens))
            return None
        return compared(b.predictions, a.predictions)

    async def _seen(self, text: str) -> list[Seen] | None:
        prompt: Prompt = text
        asked: list[int] = []
        if self.known:
            ids = await asyncio.gather(*(token_ids(way.target, text) for way in self.ways))
            if ids[0] != ids[1] or not ids[0]:
                self.unlike = _unlike(text, *(len(each or ()) for each in ids))
                return None
            prompt, asked = ids[0], positions(len(ids[0]), f"{self.seed}/{text}")
        return list(await asyncio.gather(*(way.ask(prompt, asked) for way in self.ways)))


async def _at_once(asker: _Asker, texts: Sequence[tuple[str, str]], streams: int) -> list[Text | None]:
    limit = asyncio.Semaphore(streams)

    async def one(text: str) -> Text | None:
        async with limit:
            return await asker(text)

    return list(await asyncio.gather(*(one(text) for _, text in texts)))


def _unlike(text: str, a: int, b: int) -> str:
    how = f"{a} tokens on A and {b} on B" if a != b else f"{a} other tokens on A than on B"
    return (
        f"Closeness was not measured: the servers' tokenizers differ ({text[:30]!r} is {how}), so their predictions "
        "are not of the same tokens."
    )


def _mute(target: Target, known: bool) -> str:
    tried = ", ".join(way.name for way in WAYS)
    ids = "" if known else " It or the other server has no /tokenize, which the first and the last of them need."
    return (
        f"Closeness was not measured: server {target.name} gives no log-probabilities at /v1/completions (tried: "
        f"{tried}).{ids}"
    )
