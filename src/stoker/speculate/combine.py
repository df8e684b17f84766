"""Two drafters in one: the first that has a guess is followed. Both see every committed token."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from stoker.model.batch import Batch
from stoker.speculate.drafter import Drafter, DraftRequest


class FirstOf:
    """`first` is asked for all requests; `second` for those it had nothing for. Only one of them may need taps."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        if first.taps:
            raise ValueError("the first drafter of a pair must not need taps")
        self._first, self._second = first, second
        self.taps = second.taps
        self.max_depth = max(first.max_depth, second.max_depth)

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        self._first.observe(batch, hidden, taps, following)
        self._second.observe(batch, hidden, taps, following)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = self._first.propose(requests)
        left = [replace(r, depth=0) if guess else r for r, guess in zip(requests, drafts, strict=True)]
        return [guess or other for guess, other in zip(drafts, self._second.propose(left), strict=True)]

    def reset(self, slot: int) -> None:
        self._first.reset(slot)
        self._second.reset(slot)
