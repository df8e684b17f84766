"""A limit on the tokens of a thought, as a token mask that forces its end."""

from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from stoker.engine.rules import ThinkingBudget
from stoker.sampling.mask import RemoteMask, TokenMask


class ThinkingBudgetMask:
    """Constrains one position: after the last token of the budget, if the thought is still open there."""

    def __init__(self, budget: ThinkingBudget, inner: TokenMask | None) -> None:
        self._budget, self._inner = budget, inner
        self._closing = torch.zeros(budget.vocab_size, dtype=torch.bool)
        self._closing[budget.close] = True

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        if self._spent(output):
            return self._closing
        return self._inner.allowed(output) if self._inner else None

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        if self._spent(output):
            return (self._budget.close,)
        return self._inner.forced(output) if self._inner else ()

    def _spent(self, output: Sequence[int]) -> bool:
        budget = self._budget
        return len(output) == budget.tokens and not {budget.close, *budget.ends}.intersection(output)


class RemoteThinkingBudgetMask(ThinkingBudgetMask, RemoteMask):
    """A budget around a mask that another process computes. Where the thought is closed, the inner mask is asked what
    follows: the closing token is forced, and the step needs the mask after it too."""

    def __init__(self, budget: ThinkingBudget, inner: RemoteMask) -> None:
        super().__init__(budget, inner)
        self._remote = inner

    def ask(self, output: Sequence[int], drafts: Sequence[int] = (), room: int = 0) -> int:
        if self._spent(output):
            return min(len(drafts), self._remote.ask(output, (self._budget.close,)))
        return self._remote.ask(output, drafts, room)

    def ready(self, output: Sequence[int]) -> bool:
        return self._remote.ready([*output, self._budget.close] if self._spent(output) else output)

    @property
    def waiting(self) -> bool:
        return self._remote.waiting

    @property
    def connection(self) -> Connection | None:
        return self._remote.connection

    def close(self) -> None:
        self._remote.close()


def budget_mask(budget: ThinkingBudget) -> ThinkingBudgetMask:
    """The mask of a request, around that of its answer."""
    inner = budget.inner() if budget.inner else None
    return (
        RemoteThinkingBudgetMask(budget, inner) if isinstance(inner, RemoteMask) else ThinkingBudgetMask(budget, inner)
    )
