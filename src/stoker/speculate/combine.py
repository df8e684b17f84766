"""Two drafters in one: the first that has a guess worth following is followed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.draft import Draft, GoOn
from stoker.speculate.drafter import Drafter, DraftRequest

TRUST = 0.8  # confidence in its first token from which the first drafter's guess is taken unseen


class FirstOf:
    """`first` is asked for all requests; `second` for those it had nothing good for."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first, self._second = first, second
        self.max_depth = max(first.max_depth, second.max_depth)
        self.costs: Mapping[str, DraftCost] = {**first.costs, **second.costs}

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        drafts = self._first.propose(requests, go_on)
        good = [bool(len(draft)) and draft.confidence[0] >= TRUST for draft in drafts]
        left = [replace(r, depth=0) if taken else r for r, taken in zip(requests, good, strict=True)]
        others = self._second.propose(left, go_on)
        return [other if len(other) else draft for draft, other in zip(drafts, others, strict=True)]

    def reset(self, slot: int) -> None:
        self._first.reset(slot)
        self._second.reset(slot)


def combine(drafters: Sequence[Drafter]) -> Drafter | None:
    """One, a pair, or none."""
    if len(drafters) == 2:
        return FirstOf(drafters[0], drafters[1])
    return drafters[0] if drafters else None
