"""What an engine and its clients say to each other: plain data that pickles, whether or not a process lies between.

Commands go to the engine, reports come back. `Event` and `Sampling` travel as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.engine.request import Depth, Event
from stoker.errors import StokerError
from stoker.sampling.settings import Sampling
from stoker.weights.model_config import ModelConfig

if TYPE_CHECKING:
    from stoker.engine.engine import EngineStats
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
    phase: str
    done: int = 0  # bytes
    total: int = 0  # 0: not known

    @property
    def percent(self) -> int | None:
        return self.done * 100 // self.total if self.total else None


@dataclass(frozen=True)
class Ready:
    config: ModelConfig
    notes: Sequence[str]  # what was not used of the checkpoint, and why
    pid: int


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
