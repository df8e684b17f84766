"""A guess at the next tokens, with what the drafter thinks of each. Plain data, no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Draft:
    """`confidence[i]` is the probability the drafter gives `tokens[i]`, if all before it are right."""

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
