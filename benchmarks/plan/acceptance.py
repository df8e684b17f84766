"""Texts whose drafts come true as often as people measured with Qwen3.5-122B-A10B, for the replay on a simulated Spark.

Only means are published (tokens per step of MTP-2 and DFlash-12 by kind of text) and one row by place in the block.
A text is therefore made from a model of drafting: every token has an ease, and a draft of it is right with odds that
grow with the ease, wherever its block began. How much eases differ and how far they are alike from token to token
is one choice for all texts; one level per drafter and text is fitted to the published mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from benchmarks.plan import spark
from benchmarks.plan.replay import Block, Text

KINDS = ("prose", "code", "agent")
# Drafts accepted per step: tokens per step less the model's own (Entrpi/qwen3.5-122B-A10B-on-spark, docs/FINDINGS.md)
ACCEPTED = {
    "mtp": {"prose": 1.24, "code": 1.77, "agent": 1.88},
    "dflash": {"prose": 1.3, "code": 4.4, "agent": 7.66},
}
MEASURED_AT = {"mtp": 2, "dflash": 12}  # drafts per step of those rows; made texts go no deeper
# The one published row by place (same page, section 1a): of 36 blocks on code 34 had their first draft right, 11 their
# twelfth, and 240 drafts were right in all. Drafts of equal odds everywhere, right in the mean as often, would have
# 32.6 and 11.1: nothing in it says that odds fall with the place, or that hard tokens come in rows.
BLOCKS, FIRST, LAST, RIGHT = 36, 34, 11, 240
# How well confidence tells right drafts from wrong ones: the chance that it ranks a right first draft above a wrong
# one. Nobody published that for the 122B; the embedded model's DFlash on code has 0.89 (depth-traces.npz).
TELLS = 0.89
FITTED_ON = 20_000  # tokens


@dataclass(frozen=True)
class Shape:
    """How drafts of all texts behave, apart from how good they are on the whole."""

    spread: float  # standard deviation of log odds between tokens
    carry: float = 0.0  # correlation of neighbouring tokens' log odds


def _sigmoid(odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-odds))


def _eases(tokens: int, carry: float, rng: np.random.Generator) -> np.ndarray:
    """Standard normal, neighbours correlated by `carry`."""
    reach = 200  # tokens after which what is carried is nothing: 0.95 ** 200
    kernel = carry ** np.arange(reach) * np.sqrt(1 - carry * carry)
    return np.convolve(rng.standard_normal(tokens + reach), kernel)[reach : reach + tokens]


@dataclass(frozen=True)
class _Tokens:
    """Draws that stay the same while a fit turns its knobs, so that results move smoothly."""

    eases: np.ndarray  # [N]
    luck: np.ndarray  # [N], uniform: a draft of the token is right if it is below the draft's probability

    @staticmethod
    def draw(tokens: int, carry: float, seed: int) -> "_Tokens":
        rng = np.random.default_rng(seed)
        luck = rng.random(tokens)
        return _Tokens(_eases(tokens, carry, rng), luck)

    def chances(self, level: float, shape: Shape, depth: int) -> np.ndarray:
        """[blocks, depth]: the k-th draft of the block at token t is of token t + 1 + k."""
        blocks = len(self.eases) - depth
        at = np.arange(blocks)[:, None] + 1 + np.arange(depth)
        return _sigmoid(level + shape.spread * self.eases[at])

    def right(self, chances: np.ndarray) -> np.ndarray:
        """[blocks]: leading drafts that come true."""
        blocks, depth = chances.shape
        at = np.arange(blocks)[:, None] + 1 + np.arange(depth)
        return np.logical_and.accumulate(self.luck[at] < chances, axis=1).sum(axis=1)


def _solve(wanted: float, low: float, high: float, value: Callable[[float], float]) -> float:
    """Where a function that grows reaches `wanted`; an end of the range if it does not."""
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return (low + high) / 2


def _level(drawn: Sequence[_Tokens], shape: Shape, depth: int, accepted: float) -> float:
    """The log odds at which blocks of `depth` drafts have that many right on average."""

    def mean(level: float) -> float:
        return float(np.concatenate([own.right(own.chances(level, shape, depth)) for own in drawn]).mean())

    return _solve(accepted, -8, 14, mean)


def level(shape: Shape, depth: int, accepted: float, seed: int = 0) -> float:
    return _level([_Tokens.draw(FITTED_ON, shape.carry, seed)], shape, depth, accepted)


def tells(level: float, shape: Shape, seed: int = 0) -> float:
    """How often confidence ranks a right first draft above a wrong one."""
    tokens = _Tokens.draw(FITTED_ON, shape.carry, seed)
    chances = tokens.chances(level, shape, 1)
    right = tokens.right(chances) == 1
    ranks = np.empty(len(right))
    ranks[np.argsort(chances[:, 0])] = np.arange(len(right))
    ones, zeros = int(right.sum()), int((~right).sum())
    return float((ranks[right].sum() - ones * (ones - 1) / 2) / (ones * zeros))


def by_place(shape: Shape, seed: int = 0) -> tuple[float, float]:
    """Share of blocks whose first and last draft is right where the published mean of that row is met."""
    depth = MEASURED_AT["dflash"]
    tokens = _Tokens.draw(FITTED_ON, shape.carry, seed)
    right = tokens.right(tokens.chances(level(shape, depth, RIGHT / BLOCKS, seed), shape, depth))
    return float((right >= 1).mean()), float((right >= depth).mean())


@cache
def fit(wanted: float = TELLS, carry: float = 0.0) -> Shape:
    """The spread at which confidence tells that well, on code. Where it tells nothing, all drafts are equally sure."""

    def code(spread: float) -> float:
        shape = Shape(spread, carry)
        return tells(level(shape, MEASURED_AT["dflash"], ACCEPTED["dflash"]["code"]), shape)

    return Shape(_solve(wanted, 0.0, 8.0, code) if wanted > 0.5 else 0.0, carry)


@dataclass(frozen=True)
class Drafts:
    """What is taken to be true of drafts."""

    shape: Shape
    accepted: dict[str, dict[str, float]]  # by drafter and kind
    pools: dict[str, float]  # experts per layer that a kind's tokens choose among
    loss: float = 0.0  # share of drafts that a cheaper drafter gets wrong in addition


def make(drafts: Drafts, kind: str, texts: int, tokens: int, lookup: list[Text] | None = None) -> list[Text]:
    """Texts of one kind. What lookup finds is taken from recorded texts of that kind, one after the other."""
    experts = [spark.distinct(1 + n, drafts.pools[kind]) for n in range(16)]
    found: list[dict[str, list[Block]]] = [{} for _ in range(texts)]
    for name, depth in MEASURED_AT.items():
        drawn = [_Tokens.draw(tokens + depth, drafts.shape.carry, 1000 + number) for number in range(texts)]
        level = _level(drawn, drafts.shape, depth, drafts.accepted[name][kind])
        for own, blocks in zip(drawn, found, strict=True):
            chances = own.chances(level, drafts.shape, depth) * (1 - drafts.loss)
            right = own.right(chances)
            blocks[name] = [Block(chances[i].tolist(), int(right[i]), experts[: depth + 1]) for i in range(tokens)]
    repeated = [block for text in lookup or [] if text.kind == kind for block in text.blocks["lookup"]]
    if repeated:
        for number, blocks in enumerate(found):
            own_blocks = [repeated[(number * tokens + i) % len(repeated)] for i in range(tokens)]
            blocks["lookup"] = [replace(block, distinct=experts[: len(block.distinct)]) for block in own_blocks]
    return [Text(kind, blocks) for blocks in found]
