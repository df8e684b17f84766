"""Rows of tokens for training: which source, which place, which loss weights. A pure function of seed and step.

Rows of conversations begin at the beginning of one, as prompts do; rows of running text begin anywhere.
"""

import lzma
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

# how often rows of a source are taken, beside the others that are there
WEIGHTS = {
    "invoices": 0.14,
    "calls": 0.12,
    "calls_single": 0.05,
    "records": 0.05,
    "coined_notes": 0.05,
    "coined_invoices": 0.08,
    "coined_calls": 0.08,
    "calls_confusable": 0.05,
    "logs": 0.01,
    "arithmetic": 0.03,
    "questions": 0.03,
    "stories": 0.03,
    "code": 0.13,
    "code_tests": 0.03,
    "packages": 0.2,
    "manual": 0.03,
    "databases": 0.03,
    "novels": 0.05,
    "jargon": 0.01,
}
# what the trunk wrote itself (training.own_text), on top of that: for drafters, never for the trunk
OWN_WEIGHTS = {"own_code": 0.25, "own_prose": 0.1}
RUNNING_TEXT = frozenset(["logs", "code", "code_tests", "packages", "manual", "databases", "novels", "jargon"])
PROMPT_WEIGHT = 0.2  # of what the assistant only reads: its random names and numbers cannot be learned


def read_shard(path: Path) -> np.ndarray:
    """uint16 tokens of one source."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


def emphasis(text: str) -> dict[str, float]:
    """Factors of sources from text such as "code=3,code_tests=2"."""
    factors: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        source, _, factor = part.partition("=")
        try:
            factors[source] = float(factor)
        except ValueError:
            raise ValueError(f"'{part}' does not say how often; write SOURCE=FACTOR, such as code=3.") from None
        if source not in WEIGHTS | OWN_WEIGHTS:
            there = ", ".join(WEIGHTS | OWN_WEIGHTS)
            raise ValueError(f"there is no source '{source}' to emphasise; there are {there}.")
        if not 0 <= factors[source] < math.inf:
            raise ValueError(f"{source} cannot be taken {factor} times as often; give a factor of 0 or more.")
    return factors


@dataclass(frozen=True)
class Marks:
    """Token ids that tell turns apart."""

    end_of_text: int
    im_start: int
    assistant: int  # the token after <|im_start|> of an assistant's turn

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Marks":
        first = [tokenizer.encode(text).ids[0] for text in ("<|endoftext|>", "<|im_start|>", "assistant")]
        return cls(*first)


def loss_weights(tokens: np.ndarray, marks: Marks, prompt_weight: float = PROMPT_WEIGHT) -> np.ndarray:
    """fp32 weights [B, T] of *predicting* tokens [B, T]: 1 in assistants' turns and in text outside conversations,
    `prompt_weight` in everything else. A row may begin in the middle of a text, never of a conversation."""
    start = tokens == marks.im_start
    follower = np.zeros_like(tokens)
    follower[:, :-1] = tokens[:, 1:]
    # a code per boundary, carried forward: 1 assistant's turn, 2 any other turn, 0 outside (after a document's end)
    code = np.full(tokens.shape, -1, dtype=np.int64)
    code[start] = np.where(follower[start] == marks.assistant, 1, 2)
    code[tokens == marks.end_of_text] = 0
    code[:, 0] = np.maximum(code[:, 0], 0)
    known = np.maximum.accumulate(np.where(code >= 0, np.arange(tokens.shape[1]), 0), axis=1)
    carried = np.take_along_axis(code, known, axis=1)
    weights = np.where(carried == 2, prompt_weight, 1.0)
    weights[start] = prompt_weight
    return weights.astype(np.float32)


class Mixture:
    """Weighted rows of several sources; `factors` make some of them more or less frequent than WEIGHTS says, `own` adds
    what the trunk wrote itself."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        split: str = "train",
        only: tuple[str, ...] = (),
        factors: Mapping[str, float] | None = None,
        own: bool = False,
    ) -> None:
        self.marks = Marks.of(tokenizer)
        shards = {path.stem: path for path in sorted((directory / split).glob("*.xz"))}
        weights = WEIGHTS | OWN_WEIGHTS if own else WEIGHTS
        chosen = {name: weight for name, weight in weights.items() if name in shards and (not only or name in only)}
        if not chosen:
            raise FileNotFoundError(
                f"{directory / split} holds no token shards of {', '.join(only or WEIGHTS)}; write them with "
                "`python -m training.data.build`."
            )
        self.names = list(chosen)
        self.tokens = {name: read_shard(shards[name]) for name in self.names}
        self.starts = {name: self._starts(name) for name in self.names}
        shares = np.array([chosen[name] * (factors or {}).get(name, 1.0) for name in self.names])
        if not shares.sum() > 0:
            raise ValueError(
                f"every source there is ({', '.join(self.names)}) has a factor of 0; leave one of them in."
            )
        self.shares = shares / shares.sum()

    def _starts(self, name: str) -> np.ndarray:
        """Where documents begin."""
        ends = np.flatnonzero(self.tokens[name] == self.marks.end_of_text)
        return np.concatenate([[0], ends[:-1] + 1])

    def batch(self, seed: int, step: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 tokens [rows, length + 1] and fp32 loss weights [rows, length] of predicting tokens 1 ... length."""
        rng = np.random.default_rng([seed, step])
        out = np.empty((rows, length + 1), dtype=np.int64)
        for row, source in enumerate(rng.choice(len(self.names), size=rows, p=self.shares)):
            name = self.names[source]
            stream = self.tokens[name]
            if name in RUNNING_TEXT:
                begin = int(rng.integers(len(stream)))
            else:
                begin = int(self.starts[name][rng.integers(len(self.starts[name]))])
            out[row] = np.take(stream, np.arange(begin, begin + length + 1), mode="wrap")
        return out, loss_weights(out, self.marks)[:, 1:]
