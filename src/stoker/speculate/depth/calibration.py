"""How often a draft of a given confidence at a given place turns out right, learned while running. No torch."""

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, log

EDGES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99, 0.997)  # of the bins of confidence
CENTRES = (0.02, 0.1, 0.22, 0.4, 0.6, 0.78, 0.89, 0.95, 0.98, 0.994, 0.999)
PLACES = (1, 2, 4, 8)  # last place (from 1) of each bucket but the last
DECAY = 0.995  # per observation of a bin: about the last 200 count
FADING = 0.998  # of a place, per observation of its bin elsewhere
BIN_STRENGTH, PLACE_STRENGTH = 8.0, 24.0  # observations the guess from confidence, and the bin's rate, are worth
LIMIT = 1e-3  # rates are kept this far from 0 and 1


class _Count:
    __slots__ = ("hits", "seen", "updates")

    def __init__(self) -> None:
        self.hits = self.seen = 0.0
        self.updates = 0  # of the bin, when this count was last brought up to date

    def add(self, hit: bool, weight: float) -> None:
        self.hits = self.hits * weight + hit
        self.seen = self.seen * weight + 1.0

    def rate(self, guess: float, strength: float) -> float:
        return (self.hits + strength * guess) / (self.seen + strength)


class Calibration:
    """Rates by bin of confidence, refined by place in the block.

    A bin starts from what the drafter claims; a place within a bin starts from the bin. What was learned at a place
    fades while its bin goes on learning elsewhere, so no place stays condemned for what it did in another text. Log
    odds are kept until their bin learns something, and made anew where they are asked for.
    """

    def __init__(self) -> None:
        self._bins = [_Count() for _ in CENTRES]
        self._cells = [[_Count() for _ in range(len(PLACES) + 1)] for _ in CENTRES]  # [bin][bucket of places]
        self._logits: list[list[float | None]] = [[None] * (len(PLACES) + 1) for _ in CENTRES]

    def chances(self, confidence: Sequence[float], shift: float, start: int = 0, least: float = 0.0) -> list[float]:
        """Probabilities of drafts from place `start` (from 0) on to be right, each given that all before it are.

        Ends where no further one is reached with a probability of at least `least`. `shift` is added to all log odds.
        """
        found, reached = [], 1.0
        for place in range(start, len(confidence)):
            bin_, bucket = bisect_right(EDGES, confidence[place]), _BUCKET[place] if place < _LAST else -1
            logit = self._logits[bin_][bucket]
            if logit is None:
                logit = self._logits[bin_][bucket] = self._logit(bin_, bucket)
            chance = 1.0 / (1.0 + exp(-logit - shift))
            found.append(chance)
            reached *= chance
            if reached < least:
                break
        return found

    def add(self, place: int, confidence: float, hit: bool) -> None:
        bin_ = bisect_right(EDGES, confidence)
        own, cell = self._bins[bin_], self._cells[bin_][_BUCKET[place] if place < _LAST else -1]
        cell.add(hit, DECAY * FADING ** (own.updates - cell.updates))
        own.add(hit, DECAY)
        own.updates += 1
        cell.updates = own.updates
        self._logits[bin_] = [None] * (len(PLACES) + 1)

    def table(self) -> list[dict[str, float]]:
        """Per bin of confidence: what the drafter claims, how many were seen lately, how many of them were right."""
        return [
            {"confidence": centre, "seen": round(count.seen, 1), "right": count.rate(centre, BIN_STRENGTH)}
            for centre, count in zip(CENTRES, self._bins, strict=True)
            if count.seen >= 1.0
        ]

    def _logit(self, bin_: int, bucket: int) -> float:
        own, cell = self._bins[bin_], self._cells[bin_][bucket]
        faded = FADING ** (own.updates - cell.updates)
        cell.hits, cell.seen, cell.updates = cell.hits * faded, cell.seen * faded, own.updates
        rate = cell.rate(own.rate(CENTRES[bin_], BIN_STRENGTH), PLACE_STRENGTH)
        rate = min(max(rate, LIMIT), 1.0 - LIMIT)
        return log(rate / (1.0 - rate))


_BUCKET = [sum(place >= last for last in PLACES) for place in range(PLACES[-1])]
_LAST = len(_BUCKET)
