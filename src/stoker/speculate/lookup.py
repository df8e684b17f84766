"""Drafting by looking back: what followed the last few tokens when they last occurred in prompt or output."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import Draft, DraftRequest, GoOn

SOURCE = "lookup"  # of its drafts, in statistics
LONGEST, SHORTEST = 4, 2  # tokens of a match; a single token recurs too often to mean anything
HABIT = 0.98  # per observation: how often a match of a length went on, over about the last fifty
STRENGTH = 6.0  # observations the first guess is worth


@dataclass(slots=True)
class _Text:
    """What is known of one slot's text."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> position after it, the last one
    entered: int = 0  # tokens of the text that are in `places`
    guess: Sequence[int] = ()  # at what comes after them
    length: int = 0  # of the match it came from, counting what came true since it was found


class LookupDrafter:
    """Each token is entered once, and no step copies the text, however long it is.

    Confidence is how often matches of that length went on lately, in any request; a guess is checked against the text
    that came whether or not it was verified, so that costs nothing either.
    """

    costs: Mapping[str, DraftCost] = {}

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._texts: dict[int, _Text] = {}
        lengths = LONGEST + max_depth + 1
        self._went_on = [STRENGTH * (1.0 - 0.9 / max(2, n)) for n in range(lengths)]  # longer matches go on more often
        self._seen = [STRENGTH] * lengths

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def reset(self, slot: int) -> None:
        self._texts[slot] = _Text()

    def _draft(self, request: DraftRequest) -> Draft:
        text = self._texts.get(request.slot)
        if text is None:
            text = self._texts[request.slot] = _Text()
        begin = max(0, text.entered - LONGEST)
        tail = _slice(request, begin, request.length)  # what is new, and a few tokens before
        return self._guess(text, request, tail, begin)

    def _guess(self, text: _Text, request: DraftRequest, tail: tuple[int, ...], begin: int) -> Draft:
        """What followed the text's end when that occurred before. `tail` is the text from `begin` on."""
        run = self._learn(text, tail[text.entered - begin :]) if text.guess else 0
        # the n-grams that end at the text's end are left out: they would find themselves
        for stop in range(max(text.entered - begin, SHORTEST), len(tail)):
            for start in range(max(0, stop - LONGEST), stop - SHORTEST + 1):
                text.places[tail[start:stop]] = begin + stop
        text.entered, text.guess = begin + len(tail), ()
        for start in range(max(0, len(tail) - LONGEST), len(tail) - SHORTEST + 1):
            place = text.places.get(tail[start:])
            if place is not None:
                stop = min(text.entered, place + min(request.depth, self.max_depth))
                text.guess, text.length = _slice(request, place, stop), max(len(tail) - start, run)
                sure = [self._rate(text.length + place) for place in range(len(text.guess))]
                return Draft(text.guess, sure, SOURCE if sure else "")
        return Draft()

    def _learn(self, text: _Text, came: Sequence[int]) -> int:
        """Compares the last guess with what came. -> length of the match by now, 0 if it broke off."""
        run = text.length if came else 0
        for guessed, token in zip(text.guess, came, strict=False):
            known = min(run, len(self._seen) - 1)
            self._seen[known] = self._seen[known] * HABIT + 1.0
            self._went_on[known] = self._went_on[known] * HABIT + (guessed == token)
            if guessed != token:
                return 0
            run += 1
        return run

    def _rate(self, length: int) -> float:
        known = min(length, len(self._seen) - 1)
        return self._went_on[known] / self._seen[known]


def _slice(request: DraftRequest, start: int, stop: int) -> tuple[int, ...]:
    """Tokens start .. stop of prompt and output as one text."""
    before = len(request.prompt)
    if stop <= before:
        return tuple(request.prompt[start:stop])
    if start >= before:
        return tuple(request.output[start - before : stop - before])
    return (*request.prompt[start:], *request.output[: stop - before])
