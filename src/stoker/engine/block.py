"""What one sequence brings to a step: its newest token and drafts to verify, or known tokens to compute again."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from torch import Tensor

from stoker.engine.request import Sequence
from stoker.sampling.extended import Extended
from stoker.sampling.mask import first_mask, forced_by, mask_drafts
from stoker.sampling.sampler import Row


@dataclass(slots=True)
class Block:
    sequence: Sequence
    known: list[int]  # tokens of the text that this step computes
    verifies: bool  # the model's choice after each token is wanted; else they are only computed again
    drafts: list[int] = field(default_factory=list)
    forced: bool = False  # the drafts come from the request's mask, which leaves no choice
    masks: list[Tensor | None] = field(default_factory=list)  # of what follows; empty: anything may

    @classmethod
    def decoding(cls, sequence: Sequence, vocab_size: int, window: int) -> "Block":
        """The newest token, and what the mask forces after it. Raises RequestError if the mask fails."""
        block = cls(sequence, [sequence.tokens[-1]], verifies=True)
        if sequence.mask is not None:
            block.masks = [first_mask(sequence.mask, sequence.sampling, sequence.output, vocab_size)]
            room = forced_room(sequence, window)
            forced = forced_by(sequence.mask, sequence.output, vocab_size)[:room] if room else []
            block.add(forced, vocab_size)
            block.forced = bool(block.drafts)
        return block

    @classmethod
    def replaying(cls, sequence: Sequence, stop: int) -> "Block":
        """Tokens from `computed` to `stop`, known from before a preemption."""
        return cls(sequence, sequence.tokens[sequence.computed : stop], verifies=False)

    @property
    def tokens(self) -> list[int]:
        return self.known + self.drafts

    def add(self, drafts: Many[int], vocab_size: int) -> None:
        """Takes the drafts that the request's mask permits."""
        sequence = self.sequence
        if sequence.mask is not None:
            self.masks = mask_drafts(
                sequence.mask, sequence.sampling, sequence.output, self.masks[0], drafts, vocab_size
            )
            drafts = drafts[: len(self.masks) - 1]
        self.drafts = list(drafts)

    def cut(self, depth: int) -> None:
        """Keeps the first `depth` drafts."""
        self.drafts = self.drafts[:depth]
        self.masks = self.masks[: depth + 1]

    def rows(self) -> list[Row]:
        """What the sampler must know after the newest token and after each draft."""
        sequence, masks, drafts = self.sequence, self.masks, self.drafts
        output, length = sequence.output, sequence.length
        rows = [Row(sequence.sampling, length, sequence.prompt, output, masks[0] if masks else None, sequence.past)]
        for place in range(1, len(drafts) + 1):
            before = Extended(output, drafts[:place])
            mask = masks[place] if masks else None
            rows.append(Row(sequence.sampling, length + place, sequence.prompt, before, mask, sequence.past))
        return rows


def forced_room(sequence: Sequence, window: int) -> int:
    """Most tokens that a mask may force in a step, beside the model's own."""
    return max(0, min(window, sequence.sampling.max_tokens - len(sequence.output)) - 1)
