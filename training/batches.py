"""Rows of tokens for training: which source, which place, which loss weights. A pure function of seed and step.

Rows of conversations begin at the beginning of one, as prompts do; rows of running text begin anywhere.
"""

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

# share of the rows of a batch; sources that are absent are left out and the rest scaled up
WEIGHTS = {
    "invoices": 0.22,
    "calls": 0.19,
    "calls_single": 0.07,
    "records": 0.08,
    "logs": 0.02,
    "arithmetic": 0.04,
    "questions": 0.04,
    "stories": 0.05,
    "code": 0.10,
    "code_tests": 0.03,
    "manual": 0.04,
    "databases": 0.04,
    "novels": 0.06,
    "jargon": 0.02,
}
RUNNING_TEXT = frozenset(["logs", "code", "code_tests", "manual", "databases", "novels", "jargon"])
PROMPT_WEIGHT = 0.2  # of what the assistant only reads: its random names and numbers cannot be learned


def read_shard(path: Path) -> np.ndarray:
    """uint16 tokens of one source."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


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
    """Weighted rows of several sources."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, split: str = "train", only: tuple[str, ...] = ()) -> None:
        self.marks = Marks.of(tokenizer)
        shards = {path.stem: path for path in sorted((directory / split).glob("*.xz"))}
        chosen = {name: weight for name, weight in WEIGHTS.items() if name in shards and (not only or name in only)}
        if not chosen:
            raise FileNotFoundError(
                f"{directory / split} holds no token shards of {', '.join(only or WEIGHTS)}; write them with "
                "`python -m training.data.build`."
            )
        self.names = list(chosen)
        self.tokens = {name: read_shard(shards[name]) for name in self.names}
        self.starts = {name: self._starts(name) for name in self.names}
        shares = np.array([chosen[name] for name in self.names])
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
