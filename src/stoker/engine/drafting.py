"""Asking the drafter for guesses and, for requests that leave it open, the depth controller for how many to verify."""

import time
from collections.abc import Mapping, Sequence
from itertools import compress

from stoker.engine.backend import Backend
from stoker.engine.event import AUTO
from stoker.engine.request import Request
from stoker.engine.step import StepTokens
from stoker.sampling.mask import RemoteMask, wait_for
from stoker.speculate.depth.controller import DepthController
from stoker.speculate.drafter import Drafter, DraftRequest, GoOn

MASKS_S = 0.005  # how long a step waits for what grammars say about drafts; later ones cost it the drafts


class Drafting:
    """One step after another: `propose`, then `observe` what came of it."""

    def __init__(self, backend: Backend, drafter: Drafter, max_depth: int) -> None:
        self._backend, self._drafter = backend, drafter
        self.controller: DepthController | None = None  # made for the first request that asks for it
        self._max_depth, self._vocab_size = min(max_depth, drafter.max_depth), backend.model.vocab_size
        self._adaptive: list[StepTokens] = []  # of the step under way
        self._seconds = 0.0

    def adapt(self) -> None:
        """Requests with depth "auto" are about to come."""
        if self.controller is None:
            self.controller = DepthController(self._backend.step_bytes, self._drafter.costs)

    def propose(self, entries: Sequence[StepTokens]) -> None:
        """Puts drafts into the entries of a step; what a mask forces is there already and stays."""
        drafted = [entry for entry in entries if entry.verifies and not entry.forced]
        limits = [entry.request.draft_limit(self._max_depth) for entry in drafted]
        decides = [entry.request.depth == AUTO for entry in drafted]  # how many: the controller, not the request
        self._adaptive = list(compress(drafted, decides))
        paid = self._ask(decides, limits)
        rivals = self._rivals(decides)
        requests = [
            DraftRequest(s.slot, s.pages, s.prompt, s.output, s.sampling, limit, not pays, rival, s.past)
            for s, limit, pays, rival in zip((entry.request for entry in drafted), limits, paid, rivals, strict=True)
        ]
        started = time.perf_counter()
        drafts = self._drafter.propose(requests, self._go_on(decides)) if requests else []
        self._seconds = time.perf_counter() - started
        limits = self._ask_masks(drafted, [draft.tokens[:limit] for draft, limit in zip(drafts, limits, strict=True)])
        for entry, limit, draft in zip(drafted, limits, drafts, strict=True):
            entry.add(draft.tokens[:limit], self._vocab_size)
        if self._adaptive and self.controller:
            permitted = [draft.first(len(entry.drafts)) for entry, draft in zip(drafted, drafts, strict=True)]
            depths = self.controller.cut(list(compress(permitted, decides)))
            for entry, depth in zip(self._adaptive, depths, strict=True):
                entry.cut(depth)

    def observe(self, entries: Sequence[StepTokens], emitted: Mapping[int, Sequence[int]], step_s: float) -> None:
        """Tells the controller what a step brought. It learns only from steps that were all its own, and of which no
        request was cancelled: the time of others says nothing about its choices."""
        whole = len(self._adaptive) == len(entries) and all(entry.request.id in emitted for entry in entries)
        if self.controller and self._adaptive and whole:
            tokens = [emitted[entry.request.id] for entry in self._adaptive]
            experts = self._backend.distinct_experts(sum(len(entry.tokens) for entry in entries))
            self.controller.observe(tokens, step_s - self._seconds, self._seconds, experts)

    def forget(self, request: Request) -> None:
        """It has ended."""
        if self.controller:
            self.controller.forget(request.id)

    def _ask_masks(self, entries: Sequence[StepTokens], drafts: Sequence[Sequence[int]]) -> list[int]:
        """How many drafts of each entry can be taken: those that its mask has something to say about in time."""
        covered = [len(each) for each in drafts]
        remote = [
            (place, mask) for place, entry in enumerate(entries) if isinstance(mask := entry.request.mask, RemoteMask)
        ]
        if remote:
            for place, mask in remote:
                covered[place] = mask.ask(entries[place].request.output, drafts[place])
            wait_for([mask for _, mask in remote], MASKS_S)
            for place, mask in remote:
                covered[place] = 0 if mask.waiting else covered[place]
        return covered

    def _ask(self, decides: Sequence[bool], limits: Sequence[int]) -> Sequence[bool]:
        """Which requests are worth a pass of a drafting network; those of fixed depth always are."""
        if not self._adaptive or not self.controller:
            return [True] * len(decides)
        keys = [entry.request.id for entry in self._adaptive]
        return _merged(decides, self.controller.ask(keys, list(compress(limits, decides))))

    def _rivals(self, decides: Sequence[bool]) -> list[float]:
        """What a looked-up guess has to promise; nothing where the depth is fixed."""
        if not self._adaptive or not self.controller:
            return [0.0] * len(decides)
        rivals = iter(self.controller.rivals())
        return [next(rivals) if asked else 0.0 for asked in decides]

    def _go_on(self, decides: Sequence[bool]) -> GoOn | None:
        """The controller's word on another pass; requests of fixed depth always want one."""
        controller = self.controller
        if not self._adaptive or not controller:
            return None
        return lambda drafts: _merged(decides, controller.more(list(compress(drafts, decides))))


def _merged(decides: Sequence[bool], answers: Sequence[bool]) -> list[bool]:
    """The controller's answers where it was asked, and yes everywhere else."""
    left = iter(answers)
    return [next(left) if asked else True for asked in decides]
