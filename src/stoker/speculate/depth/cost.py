"""What a step costs: bytes as a first guess, then a fit to measured seconds; and how many experts a block touches.

All plain Python on a handful of numbers, a few microseconds each. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.sizes.weights import WeightBytes
from stoker.weights.model_config import MoeConfig

DECAY = 0.99  # weight of a measurement against the one after it: about the last hundred steps count
STALL = 4.0  # times the expected seconds: a longer step was held up by something else and counts as this
WARM_UP = 8.0  # measurements before one can be called a stall; until then a much faster one starts the fit anew
TRUST_IN_BYTES = 0.003  # (noise of a measured step / doubt about the guess from bytes) squared
REFIT = 4  # measurements after the warm-up between two fits: solving costs more than all else of a step
PER_TOKEN = 0.003  # of the fixed bytes: activations, attention and arithmetic of one more token; soon measured
LEAST_DOUBT = 0.05  # of a step: what a token adds beyond bytes is next to nothing on a GPU and a tenth on a CPU


@dataclass(frozen=True)
class DraftCost:
    """Bytes a drafter reads. A pass per token (MTP) shows in `token`, one pass per block (DFlash) in `block`."""

    block: float = 0.0
    token: float = 0.0


@dataclass(frozen=True)
class StepBytes:
    """Bytes a verify step reads. Only the ratios matter: how fast they are read is measured."""

    fixed: float  # whatever is verified
    expert: float = 0.0  # one more distinct expert in every layer
    token: float = 0.0  # one more token: activations, logits, and arithmetic where that is not free
    experts: int = 0  # per layer; 0 for a dense model
    top_k: int = 0

    @classmethod
    def of(cls, weights: WeightBytes, moe: MoeConfig | None) -> "StepBytes":
        """A verify step of the trunk: embedding rows are few, the MTP head is the drafter's."""
        fixed = sum(weights.fixed.values())
        experts, top_k = (moe.num_experts, moe.top_k) if moe else (0, 0)
        return cls(fixed, weights.expert(experts), PER_TOKEN * fixed, experts, top_k)


class LinearFit:
    """seconds = sum of coefficient * feature, no coefficient below 0, old measurements fading.

    Where the measurements do not tell features apart (a depth that never changes), the ratios of `shape` decide. Its
    scale is learned as well, so a shape in bytes will do.
    """

    def __init__(self, shape: Sequence[float]) -> None:
        self._shape = list(shape)
        self.coefficients = list(shape)
        self._clear()

    def _clear(self) -> None:
        size = len(self._shape)
        self._products = [[0.0] * size for _ in range(size)]  # decayed sum of x x^T
        self._targets = [0.0] * size  # decayed sum of x * seconds
        self._weight = self._seconds = self._units = 0.0
        self._unused = 0  # measurements since the last fit

    @property
    def measured(self) -> bool:
        return self._weight > 0.0

    @property
    def scale(self) -> float:
        """Measured seconds per unit of the shape; 1 before anything was measured."""
        return self._seconds / self._units if self._units > 0.0 else 1.0

    def add(self, features: Sequence[float], seconds: float, scale: float | None = None) -> None:
        """One measurement. `scale` replaces the fit's own seconds per unit, where another fit knows it better."""
        seconds = max(seconds, 1e-9)  # a coarse clock may not have moved
        if self._weight >= WARM_UP:
            seconds = min(seconds, STALL * self.seconds(features))
        elif self._weight and seconds * STALL < self.seconds(features):
            self._clear()
        size = len(features)
        products, targets = self._products, self._targets
        for i in range(size):
            row, x = products[i], features[i]
            for j in range(size):
                row[j] = row[j] * DECAY + x * features[j]
            targets[i] = targets[i] * DECAY + x * seconds
        self._weight = self._weight * DECAY + 1.0
        self._seconds = self._seconds * DECAY + seconds
        self._units = self._units * DECAY + sum(f * s for f, s in zip(features, self._shape, strict=True))
        self._unused += 1
        if self._weight < WARM_UP or self._unused >= REFIT:
            self.guess(self.scale if scale is None else scale)

    def guess(self, scale: float) -> None:
        """Solves for the coefficients nearest to the measurements and to shape * scale."""
        self._unused = 0
        size = len(self._shape)
        typical = self._seconds / self._weight if self._weight else max(scale * sum(self._shape), 1e-12)
        guess = [s * scale for s in self._shape]
        # a guess of next to nothing is no firmer than one of LEAST_DOUBT, and one of far too much still pulls, or there
        # would be nothing to tell coefficients apart by
        pull = [TRUST_IN_BYTES * max(typical / max(g, LEAST_DOUBT * typical), 1e-3) ** 2 for g in guess]
        live = list(range(size))
        while live:
            matrix = [[self._products[i][j] + (pull[i] if i == j else 0.0) for j in live] for i in live]
            found = _solve(matrix, [self._targets[i] + pull[i] * guess[i] for i in live])
            negative = [i for i, value in zip(live, found, strict=True) if value < 0.0]
            if not negative:
                break
            live = [i for i in live if i not in negative]
        self.coefficients = [0.0] * size
        for i, value in zip(live, found if live else (), strict=True):
            self.coefficients[i] = value

    def seconds(self, features: Sequence[float]) -> float:
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))


class ExpertPool:
    """Distinct experts a block touches, per layer: tokens of one text draw from a pool smaller than all experts.

    n tokens with top_k of `pool` experts each touch pool * (1 - (1 - top_k / pool) ** n). The pool is learned from
    measured steps: a text that stays with few experts makes deep verification cheap.
    """

    PATIENCE = 0.3  # weight of a new measurement

    def __init__(self, experts: int, top_k: int) -> None:
        self._experts, self._top_k = experts, top_k
        self.pool = float(max(top_k, experts // 2))

    def copy(self) -> "ExpertPool":
        other = ExpertPool(self._experts, self._top_k)
        other.pool = self.pool
        return other

    def distinct(self, tokens: int) -> float:
        if not self._experts:
            return 0.0
        return self.pool * (1.0 - (1.0 - self._top_k / self.pool) ** tokens)

    def next_of(self, tokens: int) -> tuple[float, float]:
        """Experts the next token adds to `tokens`, and by what factor each one after it adds less."""
        if not self._experts:
            return 0.0, 1.0
        left = 1.0 - self._top_k / self.pool
        return self._top_k * left**tokens, left

    def add(self, tokens: int, distinct: float) -> None:
        """The pool of which so many tokens touch so many experts, by Newton's method: they are concave in its size.
        A block of one token tells nothing about overlap."""
        if tokens < 2 or not self._experts:
            return
        size, largest = self.pool, float(self._experts)
        for _ in range(20):
            left = 1.0 - self._top_k / size
            missed = left**tokens
            slope = 1.0 - missed - tokens * (1.0 - left) * left ** (tokens - 1)
            wanted = size + (distinct - size * (1.0 - missed)) / max(slope, 1e-9)
            size, before = min(max(wanted, float(self._top_k)), largest), size
            if abs(size - before) < 1e-3 * size:
                break
        self.pool += self.PATIENCE * (size - self.pool)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; `matrix` is symmetric and positive definite, so no pivot is 0."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            if factor:
                for k in range(i, size):
                    matrix[j][k] -= factor * matrix[i][k]
                right[j] -= factor * right[i]
    found = [0.0] * size
    for i in range(size - 1, -1, -1):
        found[i] = (right[i] - sum(matrix[i][k] * found[k] for k in range(i + 1, size))) / matrix[i][i]
    return found
