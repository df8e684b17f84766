"""What an engine and its clients say to each other: plain data that pickles, whether or not a process lies between.

Commands go to the engine, reports come back. `Event` and `Sampling` travel as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.backends.progress import UNITS
from stoker.engine.event import Depth, Event
from stoker.errors import StokerError
from stoker.sampling.settings import Sampling
from stoker.weights.model_config import ModelConfig

if TYPE_CHECKING:
    from stoker.engine.event import EngineStats
    from stoker.sampling.mask import TokenMask


@dataclass(frozen=True)
class RequestBody:
    """A request's own part of `Submit`."""

    prompt: Sequence[int]
    sampling: Sampling
    depth: Depth
    boundaries: Sequence[int]
    mask: "Callable[[], TokenMask] | None"  # a mask has state, so it is built where it is used


@dataclass(frozen=True)
class Submit:
    request_id: int  # the client's
    body: bytes  # a pickled `RequestBody`: what cannot be read at the other end fails this request alone


@dataclass(frozen=True)
class Cancel:
    request_id: int


@dataclass(frozen=True)
class AskStats:
    ticket: int


@dataclass(frozen=True)
class ReleaseMemory:
    """Memory runs short: give up the prefix cache."""


@dataclass(frozen=True)
class Shutdown:
    drain: bool  # finish what is running and queued first
    reason: str


Command = Submit | Cancel | AskStats | ReleaseMemory | Shutdown


@dataclass(frozen=True)
class Loading:
    phase: str  # of `backends/progress.py`
    done: int = 0  # bytes, kernels, graphs
    total: int = 0  # 0: not known

    @property
    def percent(self) -> int | None:
        return self.done * 100 // self.total if self.total else None

    @property
    def amount(self) -> str:
        """How much of the phase is done, for people."""
        unit = UNITS.get(self.phase, "")
        if not self.total:
            return ""
        if unit == "bytes":
            return f"{self.done / 2**30:.1f} of {self.total / 2**30:.1f} GiB"
        return f"{self.done:,} of {self.total:,}"


@dataclass(frozen=True)
class PhaseTime:
    """A phase of a start that is over."""

    name: str
    seconds: float
    count: int = 0  # of kernels or graphs, where they are what was counted

    def __str__(self) -> str:
        verb, _, what = self.name.partition(" ")
        return f"{verb} {self.count} {what} {self.seconds:.1f}" if self.count else f"{self.name} {self.seconds:.1f}"


@dataclass(frozen=True)
class Ready:
    config: ModelConfig
    notes: Sequence[str]  # what was not used of the checkpoint, and why
    pid: int
    phases: Sequence[PhaseTime] = ()  # how long the start took, by phase


@dataclass(frozen=True)
class Events:
    """All that one step made, for all requests."""

    events: Sequence[Event]


@dataclass(frozen=True)
class Answer:
    ticket: int
    stats: "EngineStats"


@dataclass(frozen=True)
class Ended:
    """The engine's last word: nothing runs any more, and this is why."""

    error: StokerError


Report = Loading | Ready | Events | Answer | Ended
