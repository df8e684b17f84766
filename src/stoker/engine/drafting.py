"""Asking the drafter for guesses and, for requests that leave it open, the depth controller for how many to verify."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from itertools import compress

from stoker.backends.cpu.decoder import Decoder
from stoker.engine.block import Block
from stoker.engine.request import AUTO, Sequence
from stoker.sampling.mask import RemoteMask, wait_for
from stoker.speculate.depth.controller import DepthController
from stoker.speculate.depth.reads import step_bytes
from stoker.speculate.draft import GoOn
from stoker.speculate.drafter import Drafter, DraftRequest

MASKS_S = 0.005  # how long a step waits for what grammars say about drafts; later ones cost it the drafts


class Drafting:
    """One step after another: `propose`, then `observe` what came of it."""

    def __init__(
        self, model: Decoder, drafter: Drafter, max_depth: int, distinct_experts: Callable[[int], float | None]
    ) -> None:
        """`distinct_experts` is the runner's."""
        self._model, self._drafter, self._distinct_experts = model, drafter, distinct_experts
        self.controller: DepthController | None = None  # made for the first request that asks for it
        self._max_depth, self._vocab_size = min(max_depth, drafter.max_depth), model.config.vocab_size
        self._adaptive: list[Block] = []  # of the step under way
        self._seconds = 0.0

    def adapt(self) -> None:
        """Requests with depth "auto" are about to come."""
        if self.controller is None:
            self.controller = DepthController(step_bytes(self._model), self._drafter.costs)

    def propose(self, blocks: Many[Block]) -> None:
        """Puts drafts into the blocks of a step; what a mask forces is there already and stays."""
        drafted = [block for block in blocks if block.verifies and not block.forced]
        limits = [depth_limit(block.sequence, self._max_depth) for block in drafted]
        decides = [block.sequence.depth == AUTO for block in drafted]  # how many: the controller, not the request
        self._adaptive = list(compress(drafted, decides))
        paid = self._ask(decides, limits)
        requests = [
            DraftRequest(s.slot, s.pages, s.prompt, s.output, s.sampling, limit, not pays, s.past)
            for s, limit, pays in zip((block.sequence for block in drafted), limits, paid, strict=True)
        ]
        started = time.perf_counter()
        drafts = self._drafter.propose(requests, self._go_on(decides)) if requests else []
        self._seconds = time.perf_counter() - started
        limits = self._ask_masks(drafted, [draft.tokens[:limit] for draft, limit in zip(drafts, limits, strict=True)])
        for block, limit, draft in zip(drafted, limits, drafts, strict=True):
            block.add(draft.tokens[:limit], self._vocab_size)
        if self._adaptive and self.controller:
            permitted = [draft.first(len(block.drafts)) for block, draft in zip(drafted, drafts, strict=True)]
            depths = self.controller.cut(list(compress(permitted, decides)))
            for block, depth in zip(self._adaptive, depths, strict=True):
                block.cut(depth)

    def observe(self, blocks: Many[Block], emitted: Mapping[int, Many[int]], step_s: float) -> None:
        """Tells the controller what a step brought. It learns only from steps that were all its own: the time of others
        says nothing about its choices."""
        if self.controller and self._adaptive and len(self._adaptive) == len(blocks):
            tokens = [emitted[block.sequence.id] for block in self._adaptive]
            experts = self._distinct_experts(sum(len(block.tokens) for block in blocks))
            self.controller.observe(tokens, step_s - self._seconds, self._seconds, experts)

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        if self.controller:
            self.controller.forget(sequence.id)

    def _ask_masks(self, blocks: Many[Block], drafts: Many[Many[int]]) -> list[int]:
        """How many drafts of each block can be taken: those that its mask has something to say about in time."""
        covered = [len(each) for each in drafts]
        remote = [
            (place, mask) for place, block in enumerate(blocks) if isinstance(mask := block.sequence.mask, RemoteMask)
        ]
        for place, mask in remote:
            covered[place] = mask.ask(blocks[place].sequence.output, drafts[place])
        wait_for([mask for _, mask in remote], MASKS_S)
        for place, mask in remote:
            covered[place] = 0 if mask.waiting else covered[place]
        return covered

    def _ask(self, decides: Many[bool], limits: Many[int]) -> Many[bool]:
        """Which requests are worth a pass of a drafting network; those of fixed depth always are."""
        if not self._adaptive or not self.controller:
            return [True] * len(decides)
        keys = [block.sequence.id for block in self._adaptive]
        return _merged(decides, self.controller.ask(keys, list(compress(limits, decides))))

    def _go_on(self, decides: Many[bool]) -> GoOn | None:
        """The controller's word on another pass; requests of fixed depth always want one."""
        controller = self.controller
        if not self._adaptive or not controller:
            return None
        return lambda drafts: _merged(decides, controller.more(list(compress(drafts, decides))))


def _merged(decides: Many[bool], answers: Many[bool]) -> list[bool]:
    """The controller's answers where it was asked, and yes everywhere else."""
    left = iter(answers)
    return [next(left) if asked else True for asked in decides]


def depth_limit(sequence: Sequence, max_depth: int) -> int:
    """Never more drafts than could still be emitted beside the model's own token."""
    depth = max_depth if sequence.depth == AUTO else sequence.depth
    return max(0, min(depth, sequence.sampling.max_tokens - len(sequence.output) - 1))
