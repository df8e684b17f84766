"""Drafting a whole block in one pass of a DFlash network, which reads the trunk's taps."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.drafter import Draft, DraftRequest, GoOn, groups_of
from stoker.weights.dflash_config import DFlashConfig

SOURCE = "dflash"


class DFlashNetwork(Protocol):
    """A backend's DFlash network with its context. The backend shows it the tokens that are committed."""

    @property
    def config(self) -> DFlashConfig: ...

    @property
    def cost(self) -> DraftCost: ...

    def groups(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]:
        """Indices of requests that can be drafted for together."""

    def blocks(
        self, requests: Sequence[DraftRequest], depths: Sequence[int]
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]:
        """As many tokens for each request as its depth, and the probability of each."""


class DFlashDrafter:
    """One pass, however deep."""

    def __init__(self, network: DFlashNetwork, max_depth: int) -> None:
        self.max_depth, self._network = min(max_depth, network.config.block_size - 1), network
        self.costs: Mapping[str, DraftCost] = {SOURCE: network.cost}

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        found = [Draft() for _ in requests]
        for group, depths in groups_of(self._network, requests, self.max_depth):
            blocks = self._network.blocks([requests[i] for i in group], depths)
            for i, tokens, sure in zip(group, *blocks, strict=True):
                found[i] = Draft(tokens, sure, SOURCE)
        return found

    def reset(self, slot: int) -> None:
        """The backend resets its network."""
