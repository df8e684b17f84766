"""What the engine asks of a drafter, two drafters in one, and the rule by which drafts are accepted.

What a drafter guesses never changes the output, only how fast it comes. A drafter that computes drives a network of the
backend; the backend shows that every committed token exactly once, whether or not it is asked to draft, so its keys and
values are always those of the text so far.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from stoker.sampling.settings import Sampling
from stoker.speculate.depth.cost import DraftCost

if TYPE_CHECKING:
    from stoker.sampling.sampler import Past, Row

TRUST = 0.8  # confidence in its first token from which the first drafter's guess is taken unseen


@dataclass(slots=True)
class Draft:
    """A guess. `confidence[i]` is the probability the drafter gives `tokens[i]`, if all before it are right."""

    tokens: Sequence[int] = ()
    confidence: Sequence[float] = ()
    source: str = ""  # the drafter's name: costs and calibration are kept per source

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.confidence):
            raise ValueError(f"{len(self.tokens)} drafted tokens come with {len(self.confidence)} confidences")

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    def first(self, depth: int) -> "Draft":
        """The first `depth` guesses."""
        return self if depth >= len(self.tokens) else Draft(self.tokens[:depth], self.confidence[:depth], self.source)


# Asked by a drafter that makes one token per pass, after each pass: which requests are worth another?
# Drafts and answers stand in the order of the requests; the answer for a request that is done is ignored.
GoOn = Callable[[Sequence[Draft]], Sequence[bool]]


@dataclass(slots=True)
class DraftRequest:
    """One request that wants up to `depth` tokens after `output`."""

    slot: int
    pages: Sequence[int]
    prompt: Sequence[int]
    output: Sequence[int]  # the last one is not in the cache yet
    sampling: Sampling
    depth: int
    free_only: bool = False  # not worth a pass of a drafting network this step; what costs nothing is welcome
    rival: float = 0.0  # right drafts that a guess of the first of two drafters has to promise to be taken unseen
    past: "Past | None" = None  # what penalties ask about prompt and output, where they do

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)


class Drafter(Protocol):
    max_depth: int
    costs: Mapping[str, DraftCost]  # by the source its drafts name; a source that is not there is free

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        """Up to `depth` guesses for each request; a drafter that works in passes asks `go_on` after each."""

    def reset(self, slot: int) -> None:
        """The slot belongs to a new request."""


class FirstOf:
    """Two drafters in one: `first` is asked for all requests, `second` for those it had nothing worth following for."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first, self._second = first, second
        self.max_depth = max(first.max_depth, second.max_depth)
        self.costs: Mapping[str, DraftCost] = {**first.costs, **second.costs}

    def propose(self, requests: Sequence[DraftRequest], go_on: GoOn | None = None) -> list[Draft]:
        drafts = self._first.propose(requests, go_on)
        good = [trusted(draft, request.rival) for draft, request in zip(drafts, requests, strict=True)]
        left = [replace(r, depth=0) if taken else r for r, taken in zip(requests, good, strict=True)]
        others = self._second.propose(left, go_on)
        return [other if len(other) else draft for draft, other in zip(drafts, others, strict=True)]

    def reset(self, slot: int) -> None:
        self._first.reset(slot)
        self._second.reset(slot)


def trusted(draft: Draft, rival: float) -> bool:
    """Is a guess of the first of two drafters taken unseen? It has to promise `rival` right drafts."""
    if not len(draft) or draft.confidence[0] < TRUST:
        return False
    promised, reached = 0.0, 1.0
    for confidence in draft.confidence:
        reached *= confidence
        promised += reached
    return promised >= rival


def combine(drafters: Sequence[Drafter]) -> Drafter | None:
    """One, a pair, or none."""
    if len(drafters) == 2:
        return FirstOf(drafters[0], drafters[1])
    return drafters[0] if drafters else None


class Groups(Protocol):
    def groups(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[list[int]]: ...


def groups_of(
    network: Groups, requests: Sequence[DraftRequest], max_depth: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Indices of the requests that want a network's drafts, in groups it can serve at once, and the depth of each."""
    live = [i for i, request in enumerate(requests) if request.depth > 0 and not request.free_only]
    depths = [min(requests[i].depth, max_depth) for i in live]
    if live:
        for group in network.groups([requests[i] for i in live], depths):
            yield [live[place] for place in group], [depths[place] for place in group]


def draft_row(request: DraftRequest, drafts: Sequence[int]) -> "Row":
    """How the draft after `drafts` is chosen. The text so far is spelled out only for settings that look at it."""
    from stoker.sampling.sampler import Extended, Row  # with torch, which the controller does without

    sampling = request.sampling
    looks = sampling.penalizes or sampling.min_tokens
    return Row(
        sampling,
        request.length + len(drafts),
        request.prompt if looks else (),
        Extended(request.output, drafts) if looks else (),
        past=request.past,
    )


def accept(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Tokens to emit: targets[i] is what the model chooses after i drafts, so the first wrong draft is replaced by
    the model's own choice, and a whole block of right ones earns one more."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == targets[kept]:
        kept += 1
    return list(targets[: kept + 1])
