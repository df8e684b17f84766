"""Medians, percentiles, bootstrap intervals, and the verdict on whether two medians differ by more than noise."""

from collections.abc import Sequence

import numpy as np

from stoker.bench.record import Percentiles, Spread

RESAMPLES = 2000
FEW = 5  # with fewer runs, intervals are unreliable and differences below UNSURE get no verdict
UNSURE = 0.10  # run-to-run noise of small boxes is 6-7 %


def median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def percentiles(values: Sequence[float], weights: Sequence[int] | None = None) -> Percentiles | None:
    """With linear interpolation; `weights` says how often each value counts."""
    if not len(values):
        return None
    data = np.repeat(values, weights) if weights is not None else np.asarray(values)
    if not len(data):
        return None
    return Percentiles(*(float(found) for found in np.percentile(data, (50, 95, 99))))


def spread(values: Sequence[float]) -> Spread | None:
    if not len(values):
        return None
    low, high = interval(values)
    return Spread(float(min(values)), float(max(values)), low, high)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median; the same numbers give the same interval."""
    medians = _resampled(np.asarray(values, dtype=float), 0)
    return float(np.percentile(medians, 2.5)), float(np.percentile(medians, 97.5))


def change(a: Sequence[float], b: Sequence[float], paired: bool) -> tuple[float, float, float]:
    """b over a minus one: by medians, and its 95 % interval. Pairs are runs that were interleaved."""
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if paired:
        ratios = second / first
        middle, ratio = float(np.median(ratios)), _resampled(ratios, 0)
    else:
        middle = float(np.median(second) / np.median(first))
        ratio = _resampled(second, 1) / _resampled(first, 0)
    return middle - 1, float(np.percentile(ratio, 2.5)) - 1, float(np.percentile(ratio, 97.5)) - 1


def verdict(low: float, high: float, middle: float, runs: int, higher_is_better: bool | None) -> str:
    if runs < 2:
        return "too few runs"
    if low <= 0 <= high:
        return "within the noise"
    if runs < FEW and abs(middle) < UNSURE:
        return "too few runs"
    if higher_is_better is None:
        return "different"
    return "better" if (middle > 0) == higher_is_better else "worse"


def _resampled(values: np.ndarray, seed: int) -> np.ndarray:
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    return np.median(values[draws], axis=1)
