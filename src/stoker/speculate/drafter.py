"""What the engine asks of a drafter, and the rule by which drafts are accepted.

A drafter that computes with what the model computed sees every committed token exactly once (`observe`), whether or
not it is asked to draft, so its own KV is always that of the text so far. What it guesses never changes the output,
only how fast it comes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stoker.backends.cpu.batch import Batch
from stoker.sampling.sampler import Past
from stoker.sampling.settings import Sampling
from stoker.speculate.depth.cost import DraftCost
from stoker.speculate.draft import Draft, GoOn


@dataclass(slots=True)
class DraftRequest:
    """One sequence that wants up to `depth` tokens after `output`."""

    slot: int
    pages: Sequence[int]
    prompt: Sequence[int]
    output: Sequence[int]  # the last one is not in the cache yet
    sampling: Sampling
    depth: int
    free_only: bool = False  # not worth a pass of a drafting network this step; what costs nothing is welcome
    past: Past | None = None  # what penalties ask about prompt and output, where they do

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class Drafter(Protocol):
    taps: tuple[int, ...]  # trunk layers whose output `observe` needs
    observes: bool  # else it needs the text alone and `observe` is not called
    max_depth: int
    costs: Mapping[str, DraftCost]  # by the source its drafts name; a source that is not there is free

    def observe(self, batch: Batch, hidden: Tensor, taps: Tensor, following: Tensor) -> None:
        """Committed tokens: their post-norm hidden [T, H], taps [T, n * H] and the token that follows each [T]."""

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        """Up to `depth` guesses for each request; a drafter that works in passes asks `go_on` after each."""

    def reset(self, slot: int) -> None:
        """The slot belongs to a new sequence."""

    def flush(self, slot: int) -> None:
        """Everything observed of this slot is now in the drafter's KV. Needed before its pages are shared."""


def accept(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Tokens to emit: targets[i] is what the model chooses after i drafts, so the first wrong draft is replaced by
    the model's own choice, and a whole block of right ones earns one more."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == targets[kept]:
        kept += 1
    return list(targets[: kept + 1])
