"""What an engine asks of the device it runs on. `backends/` has the CPU's and the GPU's."""

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from stoker.engine.block import Block
from stoker.engine.flat import Part
from stoker.engine.outcome import Emitted
from stoker.sampling.sampler import Row

if TYPE_CHECKING:
    from stoker.engine.scheduler import Scheduler


class Saved(Protocol):
    """Recurrent states to go back to."""

    @property
    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]: ...

    def save(self, cache: Any, slot: int, index: int, pending: int = 0) -> None:
        """Keeps the state with the first `pending` tokens of the slot's last step in it."""

    def restore(self, cache: Any, slot: int, index: int) -> None: ...


class States(Protocol):
    """KV pages and recurrent slots of every layer."""

    @property
    def layers(self) -> tuple[Any, ...]: ...

    def reset(self, slot: int) -> None:
        """The slot belongs to a new sequence."""

    def snapshots(self, count: int) -> Saved: ...


class StepRunner(Protocol):
    def prefill(self, parts: list[Part], first_rows: dict[int, Row]) -> Emitted:
        """Prompt chunks; requests in `first_rows` end their prompt here and get their first token."""

    def verify(self, blocks: list[Block]) -> Emitted:
        """One step: the newest token of each block and its drafts, or tokens to compute again."""

    def distinct_experts(self, tokens: int) -> float | None:
        """That the last forward read, per layer on average; None if it was not one over so many tokens, or nobody
        counted. Never fewer than there were: who counts reads may count an expert twice that was read twice."""


class Backend(Protocol):
    @property
    def cache(self) -> States: ...

    def runner(self, scheduler: "Scheduler") -> StepRunner: ...
