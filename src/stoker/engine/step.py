"""What one request brings to a forward: a chunk of its prompt, or its tokens of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stoker.engine.request import Request
from stoker.sampling.mask import first_mask, forced_by, mask_drafts
from stoker.sampling.sampler import Extended, Row

MAX_ROWS = 128  # of one step's forward: up to here a row's bits do not depend on how many ride along


@dataclass(slots=True)
class Chunk:
    """Tokens of a prompt, after those that are computed already."""

    request: Request
    tokens: list[int]
    first: Row | None = None  # how the token after them is chosen, where they end the prompt
    keeps: list[tuple[int, int]] = field(default_factory=list)  # places before its end, and snapshots to make there


@dataclass(slots=True)
class StepTokens:
    """The newest token and drafts to verify, or known tokens to compute again."""

    request: Request
    known: list[int]  # tokens of the text that this step computes
    verifies: bool  # the model's choice after each token is wanted; else they are only computed again
    drafts: list[int] = field(default_factory=list)
    forced: bool = False  # the drafts come from the request's mask, which leaves no choice
    masks: list[Tensor | None] = field(default_factory=list)  # of what follows; empty: anything may

    @classmethod
    def decoding(cls, request: Request, vocab_size: int, window: int) -> "StepTokens":
        """The newest token, and what the mask forces after it. Raises RequestError if the mask fails."""
        entry = cls(request, [request.tokens[-1]], verifies=True)
        if request.mask is not None:
            entry.masks = [first_mask(request.mask, request.sampling, request.output, vocab_size)]
            room = forced_room(request, window)
            forced = forced_by(request.mask, request.output, vocab_size)[:room] if room else []
            entry.add(forced, vocab_size)
            entry.forced = bool(entry.drafts)
        return entry

    @classmethod
    def replaying(cls, request: Request, stop: int) -> "StepTokens":
        """Tokens from `computed` to `stop`, known from before a preemption."""
        return cls(request, request.tokens[request.computed : stop], verifies=False)

    @property
    def tokens(self) -> list[int]:
        return self.known + self.drafts

    def add(self, drafts: Sequence[int], vocab_size: int) -> None:
        """Takes the drafts that the request's mask permits."""
        request = self.request
        if request.mask is not None:
            self.masks = mask_drafts(request.mask, request.sampling, request.output, self.masks[0], drafts, vocab_size)
            drafts = drafts[: len(self.masks) - 1]
        self.drafts = list(drafts)

    def cut(self, depth: int) -> None:
        """Keeps the first `depth` drafts."""
        self.drafts = self.drafts[:depth]
        self.masks = self.masks[: depth + 1]

    def rows(self) -> list[Row]:
        """What the sampler must know after the newest token and after each draft."""
        request, masks, drafts = self.request, self.masks, self.drafts
        output, length = request.output, request.length
        rows = [Row(request.sampling, length, request.prompt, output, masks[0] if masks else None, request.past)]
        for place in range(1, len(drafts) + 1):
            before = Extended(output, drafts[:place])
            mask = masks[place] if masks else None
            rows.append(Row(request.sampling, length + place, request.prompt, before, mask, request.past))
        return rows


def forced_room(request: Request, window: int) -> int:
    """Most tokens that a mask may force in a step, beside the model's own."""
    return max(0, min(window, request.sampling.max_tokens - len(request.output)) - 1)


def split_rows(entries: Sequence[StepTokens]) -> list[list[StepTokens]]:
    """Entries in groups of at most MAX_ROWS tokens."""
    groups: list[list[StepTokens]] = []
    rows = 0
    for entry in entries:
        if not groups or rows + len(entry.tokens) > MAX_ROWS:
            groups.append([])
            rows = 0
        groups[-1].append(entry)
        rows += len(entry.tokens)
    return groups
