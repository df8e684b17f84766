"""Drafting with the model's own MTP head: one layer, fed back to itself for depths beyond one."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import Draft, DraftRequest, GoOn, groups_of

SOURCE = "mtp"


class MtpPasses(Protocol):
    """Drafts of some requests as they are made, one more in every pass. The first is there from the beginning."""

    def next(self, depths: Sequence[int]) -> None:
        """One more draft for each request that has fewer than its depth."""

    def read(self, depths: Sequence[int]) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]:
        """What was drafted up to each request's depth: tokens, and the probability of each. The host waits for it."""


class MtpNetwork(Protocol):
    """A backend's MTP head, with keys and values of its own. The backend shows it the tokens that are committed."""

    @property
    def cost(self) -> DraftCost: ...

    def groups(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        """Indices of requests that can be drafted for together."""

    def begin(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> MtpPasses:
        """Makes the first draft of each; no depth will grow."""


class MtpDrafter:
    """After each pass it asks whether another is worth it, if there is anybody to ask."""

    def __init__(self, network: MtpNetwork, max_depth: int) -> None:
        self.max_depth, self._network = max_depth, network
        self.costs: Mapping[str, DraftCost] = {SOURCE: network.cost}

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        found = [Draft() for _ in requests]
        for group, depths in groups_of(self._network, requests, self.max_depth):
            passes = self._network.begin([requests[i] for i in group], depths)
            for made in range(1, max(depths)):
                if go_on is not None:
                    so_far = [Draft() for _ in requests]
                    for i, tokens, sure in zip(group, *passes.read(_capped(depths, made)), strict=True):
                        so_far[i] = Draft(tokens, sure, SOURCE)
                    wanted = go_on(so_far)
                    depths = [n if wanted[i] else min(n, made) for i, n in zip(group, depths, strict=True)]
                    if max(depths) == made:
                        break
                passes.next(depths)
            for i, tokens, sure in zip(group, *passes.read(depths), strict=True):
                found[i] = Draft(tokens, sure, SOURCE)
        return found

    def reset(self, slot: int) -> None:
        """The backend resets its network."""


def _capped(depths: Sequence[int], made: int) -> list[int]:
    return [min(depth, made) for depth in depths]
