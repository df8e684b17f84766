"""A request and where it stands: plain data, no tensors of a model."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from stoker.backends.family import Family
from stoker.engine.prefix_cache import Chain, Key, Stretches
from stoker.engine.text import TextStream
from stoker.errors import CheckpointError, RequestError, StokerError
from stoker.sampling.mask import RemoteMask, TokenMask
from stoker.sampling.sampler import Extended, Past
from stoker.sampling.settings import Sampling
from stoker.speculate.assumed import AssumedAcceptance

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


@dataclass(eq=False)
class Request:
    """A request on its way. `computed` tokens are in cache and state, `replay` of them still pending there."""

    id: int
    prompt: list[int]
    sampling: Sampling
    depth: Depth
    mask: TokenMask | None = None
    text: TextStream | None = None  # only where stop strings must be found
    past: Past | None = None  # only where penalties ask for it
    assumed: AssumedAcceptance | None = None  # only where acceptance is not to be looked at
    snapshots_at: list[int] = field(default_factory=list)  # prompt positions whose state is worth keeping
    stepped: Stretches | None = (
        None  # parts of the prompt to compute as steps: generated earlier. None: not settled yet
    )
    output: list[int] = field(default_factory=list)
    slot: int = -1  # -1: waiting
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    replay: int = 0
    latest_snapshot: Key | None = None  # in its own output; the next one takes its place
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by position in the prompt
    chain: Chain = field(default_factory=Chain)
    stats: Stats = field(default_factory=Stats)
    submitted_at: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = Extended(self.prompt, self.output)
        self.stats.prompt_tokens = len(self.prompt)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be found: then no part of it may be skipped."""
        return self.sampling.prompt_logprobs is not None and not self.output

    @property
    def decoding(self) -> bool:
        """Everything but the newest token is computed, and there is a newest token of its own."""
        return bool(self.output) and self.computed == self.length - 1

    @property
    def history(self) -> Stretches:
        """Every part of the text that is computed as steps; the last one, its own output, is open-ended."""
        return *(self.stepped or ()), (len(self.prompt), self.length)

    def stretch(self) -> tuple[Family, int]:
        """How the tokens from `computed` on are to be computed, and where that part of the known text ends."""
        if self.computed >= len(self.prompt):
            return Family.STEP, self.length - 1
        for start, stop in self.history:
            if self.computed < start:
                return Family.PREFILL, start
            if self.computed < stop:
                return Family.STEP, stop
        raise AssertionError("the prompt ends where the output begins")

    @property
    def mask_ready(self) -> bool:
        return not isinstance(self.mask, RemoteMask) or self.mask.ready(self.output)

    def draft_limit(self, max_depth: int) -> int:
        """Never more drafts than could still be emitted beside the model's own token."""
        depth = max_depth if self.depth == AUTO else self.depth
        return max(0, min(depth, self.sampling.max_tokens - len(self.output) - 1))

    def prefilled(self, tokens: int) -> None:
        """So many more tokens of the prompt are in cache and state."""
        self.computed += tokens
        self.replay = 0
        self.stats.prefill_tokens += tokens

    def push(self, token: int) -> None:
        """Adds an emitted token."""
        self.output.append(token)
        if self.past is not None:
            self.past.push(token)
        if self.text is not None:
            self.text.push(token, may_stop=len(self.output) > self.sampling.min_tokens)

    def finish_after(self, token: int) -> Finish | None:
        """Why the request ends once `token` is its newest."""
        if token in self.sampling.stop_set or (self.text is not None and self.text.stopped is not None):
            return Finish.STOP
        return Finish.LENGTH if len(self.output) >= self.sampling.max_tokens else None
