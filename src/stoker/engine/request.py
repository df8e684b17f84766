"""A request and where it stands: plain data, no tensors."""

from dataclasses import dataclass, field
from enum import Enum

from stoker.speculate.sampling import Sampling


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Event:
    """Tokens one step made for a request; the last event of a request says why it ended."""

    request_id: int
    tokens: tuple[int, ...]
    finish: Finish | None = None


@dataclass
class Stats:
    """`steps` are verify steps. Prefill makes the first token: tokens per step are (output tokens - 1) / steps."""

    prefill_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


@dataclass
class Sequence:
    """A request on its way. `computed` tokens are in cache and state, `replay` of them still pending there."""

    id: int
    prompt: list[int]
    sampling: Sampling
    depth: int
    checkpoints: list[int] = field(default_factory=list)  # prompt positions whose state is worth keeping
    output: list[int] = field(default_factory=list)
    slot: int = -1  # -1: waiting
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    replay: int = 0
    stats: Stats = field(default_factory=Stats)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def decoding(self) -> bool:
        """Everything but the newest token is computed, and there is a newest token of its own."""
        return bool(self.output) and self.computed == self.length - 1

    def token(self, position: int) -> int:
        return self.prompt[position] if position < len(self.prompt) else self.output[position - len(self.prompt)]

    def finish_after(self, token: int) -> Finish | None:
        """Why the request ends once `token` is its newest."""
        if token in self.sampling.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(self.output) >= self.sampling.max_tokens else None
