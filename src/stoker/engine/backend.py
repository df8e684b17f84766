"""What an engine asks of the device it runs on: a network, its caches, and the drafting network beside it.

`backends/cpu` and `backends/gpu` each have one. A backend computes and remembers; what its choices mean for requests is
the engine's business (`outcome.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stoker.engine.step import Chunk, StepTokens
from stoker.speculate.depth.cost import StepBytes
from stoker.weights.model_config import ModelConfig

SCORED_ROWS = 16  # of a prompt whose logits are asked for at a time: they are large


@dataclass(frozen=True)
class Choices:
    """What the network chooses after rows of a forward."""

    tokens: list[int]  # one for each row
    logits: Tensor  # fp32 [R, vocab], until the next forward
    firsts: list[int]  # where the rows of each request begin


class Backend(Protocol):
    @property
    def model(self) -> ModelConfig: ...

    @property
    def tables(self) -> Tensor:
        """Pages of each slot [slots, P]. The scheduler writes them when it hands out pages, so that no step has to
        build tables as long as the context."""

    @property
    def step_bytes(self) -> StepBytes:
        """What a verify step reads."""

    @property
    def cache_bytes(self) -> int:
        """KV pages, recurrent states of the slots, and snapshots; what a drafting network keeps comes on top."""

    # -- computing

    @property
    def keeps_inside(self) -> bool:
        """Whether snapshots can be made in the middle of a chunk (`Chunk.keeps`), or only at its end."""

    def prompt_groups(self, chunks: Sequence[Chunk]) -> Sequence[Sequence[Chunk]]:
        """Those that are computed together."""

    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """One forward over a group of chunks."""

    def wait(self) -> None:
        """Returns when the last prefill is computed."""

    def prompt_logits(self, index: int, start: int, stop: int) -> Tensor:
        """After rows start .. stop - 1 of the chunk at `index` of the last prefill, fp32 [stop - start, vocab]; at
        most SCORED_ROWS, until the next call."""

    def first_tokens(self) -> Choices:
        """Of the last prefill, for its chunks that have a `first`, in their order."""

    def step_groups(self, entries: Sequence[StepTokens]) -> Sequence[Sequence[StepTokens]]:
        """Those that ride in one forward."""

    def step(self, entries: Sequence[StepTokens]) -> None:
        """Begins a forward over the tokens of a group; an accelerator computes while the host does other things."""

    def choices(self) -> Choices:
        """Of the last step, once it is computed. An entry that verifies nothing may have no rows."""

    def observe(self, following: Sequence[Sequence[int]]) -> None:
        """Shows the drafting network the last forward, once it is known which of its tokens are kept: following[i] are
        the tokens after the first rows of its i-th request, one each. Rows behind them were rejected."""

    def distinct_experts(self, tokens: int) -> float | None:
        """Mean distinct experts per layer in the last step, if that had so many tokens and was counted; else None. May
        over-count."""

    # -- remembering

    def reset(self, slot: int) -> None:
        """The slot belongs to a new request."""

    def save(self, slot: int, index: int, pending: int = 0) -> None:
        """Keeps a snapshot of the slot's recurrent state with the first `pending` tokens of its last step in it. From
        now on the slot's pages may be shared."""

    def restore(self, slot: int, index: int) -> None:
        """Goes back to a snapshot."""

    def release_memory(self, pages: Sequence[int]) -> int:
        """Hands the memory of all snapshots and of these pages back to the system; they read as zeros from then on.
        Returns how many bytes. On accelerators there are none: what was reserved at the start stays so."""
