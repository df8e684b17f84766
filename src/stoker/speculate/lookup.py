"""Drafting by looking back: what followed the last few tokens when they last occurred in prompt or output."""

from collections.abc import Sequence

from torch import Tensor

from stoker.model.batch import Batch
from stoker.speculate.drafter import DraftRequest

LONGEST, SHORTEST = 4, 2  # tokens of a match; a single token recurs too often to mean anything


class LookupDrafter:
    """Keeps, per slot, the last place of every n-gram; each token is entered once, however long the text."""

    taps: tuple[int, ...] = ()

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._places: dict[int, dict[tuple[int, ...], int]] = {}  # slot -> n-gram -> position after it
        self._entered: dict[int, int] = {}

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        """Everything it needs is in the text."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._guess(request) for request in requests]

    def reset(self, slot: int) -> None:
        self._places[slot] = {}
        self._entered[slot] = 0

    def _guess(self, request: DraftRequest) -> list[int]:
        text = [*request.prompt, *request.output]
        places = self._places.setdefault(request.slot, {})
        # the n-grams that end at the text's end are left out: they would find themselves
        for end in range(max(self._entered.get(request.slot, 0), SHORTEST), len(text)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                places[tuple(text[end - size : end])] = end
        self._entered[request.slot] = len(text)
        for size in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            place = places.get(tuple(text[-size:]))
            if place is not None:
                return text[place : place + min(request.depth, self.max_depth)]
        return []
