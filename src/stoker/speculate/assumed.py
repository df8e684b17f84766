"""Acceptance that is assumed: drafts are accepted without a look, so that drafting can be timed with random weights.

What comes out is no text of the model's. Nobody gets it who has not asked for it, and everything that is reported of it
says so.
"""

import math

from stoker.errors import RequestError
from stoker.speculate.choice import DraftChoice

LABEL = "acceptance assumed"  # wherever a figure of it is shown
SPREAD = (math.sqrt(5) - 1) / 2  # by which requests differ in where they begin, so that they do not step alike


def check_assumed(tokens: float | None, draft: DraftChoice) -> None:
    """`tokens` is the mean that a step is to emit. Raises a RequestError where drafts could not give it."""
    if tokens is None:
        return
    if draft.adaptive or draft.kinds not in (("mtp",), ("dflash",)):
        raise RequestError(
            "--assume-acceptance needs drafts of a fixed depth in every step: start with --draft mtp:K or dflash:K."
        )
    if not 1.0 <= tokens <= 1.0 + draft.depth:
        raise RequestError(
            f"--assume-acceptance is {tokens:g} tokens a step; with {draft.depth} drafts a step they are 1 to "
            f"{1 + draft.depth}."
        )


class AssumedAcceptance:
    """How many drafts each step of one request accepts: whole numbers whose mean is exact in the long run."""

    def __init__(self, tokens: float, request_id: int) -> None:
        self._mean, self._owed = tokens - 1.0, request_id * SPREAD % 1.0

    def accept(self, drafts: int) -> int:
        """Of so many drafts in the next step. What a step has too few drafts for, later ones make up."""
        self._owed += self._mean
        accepted = min(int(self._owed + 1e-9), drafts)
        self._owed -= accepted
        return accepted
