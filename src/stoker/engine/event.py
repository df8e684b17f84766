"""What an engine tells: the tokens of a step, why a request ended and what it cost, and how the engine stands.

Plain data without torch, since a server reads it in a process that has none.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from stoker.errors import CheckpointError, RequestError, StokerError

AUTO: Literal["auto"] = "auto"  # a depth that the depth controller chooses anew each step
Depth = int | Literal["auto"]


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """Of one token of a prompt or an answer, under the model's own distribution at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest first
    rank: int  # 1 if no token is likelier


@dataclass
class Stats:
    """What a request cost. `steps` are verify steps; prefill makes the first token, so tokens per step are
    (output tokens - 1) / steps. Tokens computed again after a preemption count again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    prefill_tokens: int = 0
    output_tokens: int = 0
    replayed_tokens: int = 0  # computed again as steps, after a preemption
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0  # tokens a mask left no choice about, taken as drafts for free; not in `drafted`
    drafted_at: list[int] = field(default_factory=list)  # drafts verified at each place of a block ...
    accepted_at: list[int] = field(default_factory=list)  # ... and those of them that were right
    depths: dict[int, int] = field(default_factory=dict)  # steps by number of drafts
    assumed_tokens: float | None = None  # the mean of a step, if drafts are accepted unseen
    preemptions: int = 0
    queue_s: float = 0.0  # until first admitted
    prefill_s: float = 0.0  # from there to the first token
    decode_s: float = 0.0  # from there to the end

    def count_drafts(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self.depths[drafted] = self.depths.get(drafted, 0) + 1
        missing = [0] * (drafted - len(self.drafted_at))
        self.drafted_at += missing
        self.accepted_at += missing
        for place in range(drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < accepted


@dataclass(frozen=True)
class Event:
    """Tokens one step made for a request; the last event of a request says why it ended and what it cost."""

    request_id: int
    tokens: tuple[int, ...]
    finish: Finish | None = None
    drafts: tuple[int, ...] = ()  # verified by the step; those that begin `tokens` were right
    forced: bool = False  # the drafts are what a mask left no choice about
    assumed: int | None = None  # so many of the drafts were accepted unseen
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first token, if asked for; not of prompt[0]
    stop: str | None = None  # the stop string that ended it
    error: str | None = None  # a sentence, with Finish.ERROR
    damaged: bool = False  # the model is at fault for the error, and not the request
    stats: Stats | None = None  # with the last event

    @property
    def failure(self) -> StokerError | None:
        """What to raise for it, where it ends with an error."""
        if self.finish is not Finish.ERROR:
            return None
        reason = self.error or "the engine ended this request and gave no reason."
        return CheckpointError(reason) if self.damaged else RequestError(reason)


@dataclass
class Totals:
    """Counted as the engine goes; requests are added when they end."""

    steps: int = 0  # verify steps
    step_s: float = 0.0  # that they took
    step_tokens: int = 0  # computed by them, drafts included
    prefill_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    depths: dict[int, int] = field(default_factory=dict)  # steps of requests by number of drafts
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Finish})

    def add(self, stats: Stats, finish: Finish) -> None:
        self.finished[finish.value] += 1
        for name in ("cached_tokens", "output_tokens", "drafted", "accepted", "forced"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        for depth, steps in stats.depths.items():
            self.depths[depth] = self.depths.get(depth, 0) + steps


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done and what it holds, as plain numbers."""

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_cached: int  # of them, those that only snapshots hold: free as soon as somebody needs them
    slots: int
    slots_used: int
    snapshots: int
    cache_bytes: int  # KV pages, state slots and snapshots, used or not
    preemptions: int
    totals: Totals
    depth_controller: dict[str, Any] | None  # its choices and predictions, distinct experts
