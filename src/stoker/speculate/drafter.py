"""What the engine asks of a drafter, and the rule by which drafts are accepted.

A drafter sees every committed token exactly once (`observe`), whether or not it is asked to draft, so its own KV is
always that of the text so far. What it guesses never changes the output, only how fast it comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stoker.model.batch import Batch
from stoker.speculate.sampling import Sampling


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that wants up to `depth` tokens after `tokens`."""

    slot: int
    pages: Sequence[int]
    prompt: Sequence[int]
    output: Sequence[int]  # the last one is not in the cache yet
    sampling: Sampling
    depth: int

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class Drafter(Protocol):
    taps: tuple[int, ...]  # trunk layers whose output `observe` needs
    max_depth: int

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        """Committed tokens: their post-norm hidden [T, H], taps [T, n * H] and the token that follows each [T]."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Up to `depth` guesses for each request."""

    def reset(self, slot: int) -> None:
        """The slot belongs to a new sequence."""


def accept(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Tokens to emit: targets[i] is what the model chooses after i drafts, so the first wrong draft is replaced by
    the model's own choice, and a whole block of right ones earns one more."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == targets[kept]:
        kept += 1
    return list(targets[: kept + 1])
