"""A request and where it stands: plain data, no tensors of a model."""

from dataclasses import dataclass, field

from stoker.backends.family import Family
from stoker.engine.event import AUTO, Depth, Finish, Stats, TokenLogprob
from stoker.engine.prefix_cache import Chain, Key, Stretches
from stoker.engine.text import TextStream
from stoker.sampling.mask import RemoteMask, TokenMask
from stoker.sampling.sampler import Extended, Past
from stoker.sampling.settings import Sampling
from stoker.speculate.assumed import AssumedAcceptance


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
