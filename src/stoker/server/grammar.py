"""A grammar as the engine's token mask, through llguidance. Made in the server, used in the engine process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llguidance
import numpy as np
import torch
from torch import Tensor

from stoker.errors import RequestError

LIMITS = llguidance.LLParserLimits()


@dataclass(frozen=True)
class Grammar:
    """Pickles; called where the engine runs, it makes a mask for one request."""

    directory: Path  # of the model, for its tokenizer
    lark: str
    vocab_size: int
    ends: tuple[int, ...]  # tokens that end an answer
    after: int | None = None  # the rules hold from this token on: the end of a thought

    def __call__(self) -> "GrammarMask":
        return GrammarMask(self)


class GrammarMask:
    """Answers depend on `output` alone: the matcher goes back and forth to wherever it is asked about."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._tokenizer = _tokenizer(grammar.directory, grammar.vocab_size, grammar.ends)
        self._matcher = self._fresh()
        self._consumed: list[int] = []
        self._thinking = torch.ones(grammar.vocab_size, dtype=torch.bool)
        self._thinking[list(grammar.ends)] = False

    def allowed(self, output: Sequence[int]) -> Tensor:
        text = self._ruled(output)
        if text is None:
            return self._thinking
        self._go_to(text)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._grammar.vocab_size].astype(np.bool_))

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        text = self._ruled(output)
        if text is None:
            return ()
        self._go_to(text)
        found = self._matcher.compute_ff_tokens()
        self._check()
        return found

    def _ruled(self, output: Sequence[int]) -> list[int] | None:
        """The part of the output that the grammar is about; None before it begins."""
        tokens = list(output)
        if self._grammar.after is None:
            return tokens
        try:
            return tokens[tokens.index(self._grammar.after) + 1 :]
        except ValueError:
            return None

    def _go_to(self, tokens: list[int]) -> None:
        common = len(self._consumed)
        if tokens[:common] != self._consumed:
            common = next(
                (place for place, pair in enumerate(zip(tokens, self._consumed, strict=False)) if pair[0] != pair[1]),
                min(len(tokens), len(self._consumed)),
            )
            self._matcher.rollback(len(self._consumed) - common)
        self._matcher.consume_tokens(tokens[common:])
        self._consumed = tokens
        self._check()

    def _check(self) -> None:
        """A matcher does not leave its error state: the next question gets a new one."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().split("\n")[0]
            self._matcher, self._consumed = self._fresh(), []
            raise RequestError(f"the grammar failed: {reason}")

    def _fresh(self) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, self._grammar.lark, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be used: {matcher.get_error().splitlines()[0]}")
        return matcher


def checked(grammar: Grammar) -> str | None:
    """What is wrong with a grammar, in llguidance's words; None if nothing is."""
    tokenizer = _tokenizer(grammar.directory, grammar.vocab_size, grammar.ends)
    lark = llguidance.LLMatcher.grammar_from_lark(grammar.lark)
    problem = llguidance.LLMatcher.validate_grammar(lark, tokenizer, limits=LIMITS)
    return problem.strip().split("\n")[0][:500] or None


@cache
def _tokenizer(directory: Path, vocab_size: int, ends: tuple[int, ...]) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(str(directory / "tokenizer.json"), n_vocab=vocab_size, eos_token=list(ends))
