"""What a request's tokens are bound to, as it is sent to the engine: plain data that pickles.

Called there, it makes the request's token mask; torch is imported no earlier.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.engine.grammar.fork_server import ForkServer, fork_server

if TYPE_CHECKING:
    from stoker.engine.grammar.mask import GrammarMask
    from stoker.engine.thinking_budget import ThinkingBudgetMask
    from stoker.sampling.mask import TokenMask


@dataclass(frozen=True)
class Grammar:
    """The grammar of an answer, or of parts of it."""

    directory: Path  # of the model, for its tokenizer
    lark: str
    vocab_size: int
    ends: tuple[int, ...]  # tokens that end an answer
    after: int | None = None  # the rules apply after this token: the end of a thought
    opened_by: int | None = None  # the rules apply, from their start, after each of these tokens ...
    closed_by: tuple[int, ...] = ()  # ... up to one of these

    def __call__(self) -> "GrammarMask":
        from stoker.engine.grammar.mask import GrammarMask

        return GrammarMask(self)

    @property
    def server(self) -> ForkServer:
        return fork_server(self.directory / "tokenizer.json", self.vocab_size, self.ends)


@dataclass(frozen=True)
class ThinkingBudget:
    """The most tokens of a thought."""

    tokens: int
    close: int  # the token that ends a thought
    ends: tuple[int, ...]  # further tokens that end a thought: the tag of a call in the middle of it
    vocab_size: int
    inner: "Callable[[], TokenMask] | None" = None  # the mask of the answer

    def __call__(self) -> "ThinkingBudgetMask":
        from stoker.engine.thinking_budget import budget_mask

        return budget_mask(self)
