"""Two servers on the same items: exact tests, intervals, and how many items a difference of N points needs.

Shares and differences are fractions: 0.03 is three points. A difference is this server minus the other, so a
negative one is a loss.
"""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
RESAMPLES = 10_000
POWER = 0.8  # chance of finding a difference that is there, where items needed are computed
UNLIKE = 0.1  # share of items on which two servers disagree, until it has been seen


def wilson(passed: float, count: int, z: float = Z) -> tuple[float, float]:
    """Interval of a share. It is never empty, not even when all items passed."""
    if not count:
        return 0.0, 1.0
    share, z2 = passed / count, z * z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def unpaired_share(passed: float, count: int, before: float, of: int, level: float = LEVEL) -> tuple[float, float]:
    """Interval of the difference of two shares on items that have nothing to do with each other: Newcombe's, from
    Wilson's intervals."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    mine, theirs = passed / count, before / of
    (low, high), (other_low, other_high) = wilson(passed, count, z), wilson(before, of, z)
    difference = mine - theirs
    return (
        difference - math.hypot(mine - low, other_high - theirs),
        difference + math.hypot(high - mine, theirs - other_low),
    )


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p of a paired comparison: of the items on which two servers disagree, how many fell which way."""
    count = gained + lost
    if not count:
        return 1.0
    tail = sum(math.comb(count, few) for few in range(min(gained, lost) + 1))
    return float(min(1.0, 2 * tail / 2**count))


def paired_share(gained: int, lost: int, count: int) -> tuple[float, float]:
    """Interval of the difference of two paired shares: Tango's score interval.

    It keeps its width where both servers agree on every item: none of 240 lost leaves room for 1.6 points.
    """
    if not count:
        return -1.0, 1.0
    middle = (gained - lost) / count

    def score(difference: float) -> float:
        b = -gained - lost + (2 * count - gained + lost) * difference
        c = -lost * difference * (1 - difference)
        q = (math.sqrt(max(b * b - 8 * count * c, 0.0)) - b) / (4 * count)
        spread = math.sqrt(max(count * (2 * q + difference * (1 - difference)), 0.0))
        distance = gained - lost - count * difference
        return distance / spread if spread else math.copysign(math.inf, distance) if distance else 0.0

    return _where(score, -1.0, middle, Z), _where(score, middle, 1.0, -Z)


def _where(score: Callable[[float], float], low: float, high: float, wanted: float) -> float:
    """Where a falling function has a value, by halving."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if score(middle) > wanted else (low, middle)
    return (low + high) / 2


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval of a mean of scores from 0 to 1; the same numbers give the same interval."""
    return _bootstrap(np.asarray(values, dtype=float), (0.0, 1.0)) if len(values) else (0.0, 1.0)


def paired_mean(differences: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval of the mean of paired differences of scores from 0 to 1."""
    return _bootstrap(np.asarray(differences, dtype=float), (-1.0, 1.0)) if len(differences) else (-1.0, 1.0)


def ratio_interval(sums: Sequence[float], counts: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of a mean over all counts, such as nats per token; what is drawn anew are the texts."""
    data, sizes = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    if not sizes.sum():
        return 0.0, math.inf
    draws = np.random.default_rng(seed).integers(0, len(data), (RESAMPLES, len(data)))
    low, high = np.percentile(data[draws].sum(axis=1) / sizes[draws].sum(axis=1), _TAILS)
    return float(low), float(high)


def permutation(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p of paired differences: how often would chance, swapping the servers item by item, do as much?

    Exact up to 16 items that differ, drawn beyond that.
    """
    data = np.asarray([value for value in differences if value], dtype=float)
    if not len(data):
        return 1.0
    if len(data) <= 16:
        places = np.arange(2 ** len(data))[:, None] >> np.arange(len(data)) & 1
        sums = np.abs(((2 * places - 1) * data).sum(axis=1))
        return float((sums >= abs(data.sum()) - 1e-9).mean())
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (RESAMPLES, len(data)))
    as_much = int((np.abs((signs * data).sum(axis=1)) >= abs(data.sum()) - 1e-9).sum())
    return (as_much + 1) / (RESAMPLES + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for asking several questions at once: one false alarm among all has the odds of the level."""
    order = sorted(range(len(ps)), key=lambda place: ps[place])
    found, worst = [1.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[place]))
        found[place] = worst
    return found


def items_needed(difference: float, unlike: float = UNLIKE, power: float = POWER) -> int:
    """Items that find a difference with this power at the level; `unlike` is the share on which the servers disagree.

    Connor's formula for paired shares. A difference cannot exceed the share of items that are unlike.
    """
    difference, unlike = abs(difference), max(unlike, abs(difference))
    reach = NormalDist().inv_cdf(power)
    root = Z * math.sqrt(unlike) + reach * math.sqrt(max(unlike - difference * difference, 0.0))
    return math.ceil((root / difference) ** 2)


def smallest_difference(count: int, unlike: float = UNLIKE, power: float = POWER) -> float:
    """The difference that so many items would find."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if items_needed(middle, unlike, power) <= count else (middle, high)
    return high


_TAILS = (50 * (1 - LEVEL), 50 * (1 + LEVEL))


def _bootstrap(data: "np.ndarray", extremes: tuple[float, float]) -> tuple[float, float]:
    """Beside the items there are two that nobody saw, one at each extreme, so that items which all agree still leave
    room. They widen the interval and do not move it."""
    widened = np.concatenate([data - data.mean(), np.asarray(extremes) - sum(extremes) / 2])
    draws = np.random.default_rng(0).integers(0, len(widened), (RESAMPLES, len(data)))
    low, high = data.mean() + np.percentile(widened[draws].mean(axis=1), _TAILS)
    return max(float(low), extremes[0]), min(float(high), extremes[1])
