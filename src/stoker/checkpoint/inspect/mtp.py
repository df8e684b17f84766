"""Is the MTP head present, complete and made of real weights? No draft of a head of zeros would be accepted.

Every tensor of it is sampled: finite, not constant, and, for matrices, of a size like the trunk's tensors of its kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stoker.checkpoint.inspect.sample import SPOTS, Values, sample
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.headers import Reads
from stoker.weights.names import EXPERTS, is_mtp, kind_of
from stoker.weights.problems import Problem
from stoker.weights.resolve import Resolution

SPOT, EXPERT_SPOT = 64 << 10, 4 << 10  # bytes per spot; experts are many and alike, so less of each is read
# Largest plausible ratio between the rms of an MTP matrix and that of its kind in the trunk: in several layers, or in
# one alone, which says less since layers differ. Noise and forgotten scales are off by more than either.
FACTOR, FACTOR_OF_ONE = 16.0, 128.0
SAMPLED = 4  # matrices of a kind that are sampled in the trunk
LARGEST_NORM = 1e3  # norm weights are not compared with the trunk's, but none is as large as this
SMALLEST_SPOT = 16  # values; fewer than this may be equal by chance


@dataclass(frozen=True)
class MtpReport:
    present: bool
    complete: bool
    sane: bool | None  # None: there is nothing to judge
    found: int  # weights, of `expected`
    expected: int
    sampled_bytes: int
    problems: tuple[Problem, ...] = ()


def inspect_mtp(resolution: Resolution, fresh_norm: float, reads: Reads) -> MtpReport:
    """`fresh_norm` is the value of a norm weight that changes nothing, as it is before training."""
    checkpoint, places = resolution.checkpoint, resolution.mtp
    before = reads.count
    if not any(place.layer for place in places):
        return MtpReport(False, False, None, 0, len(places), 0)
    whole = [
        place.layer
        for place in places
        if place.layer and place.filled and not checkpoint.cut.intersection(place.layer.tensors.values())
    ]
    trunk = _TrunkSizes(resolution, reads)
    faults: dict[str, list[tuple[LayerFormat, str]]] = {}
    for layer in whole:
        spots = sample(layer, checkpoint.tensors, reads, EXPERT_SPOT if EXPERTS in layer.name else SPOT)
        if fault := _fault(spots, len(layer.shape) < 2, fresh_norm, trunk.range(layer.name)):
            faults.setdefault(fault[0], []).append((layer, fault[1]))
    missing = sum(place.missing for place in places)
    return MtpReport(
        present=True,
        complete=not missing and len(whole) == len(places),
        sane=not faults if whole else None,
        found=len(places) - missing,
        expected=len(places),
        sampled_bytes=reads.count - before,
        problems=tuple(_problem(kind, found, len(places), checkpoint) for kind, found in faults.items()),
    )


def _problem(kind: str, found: list[tuple[LayerFormat, str]], expected: int, checkpoint: Checkpoint) -> Problem:
    layer, detail = found[0]
    tensor = next(iter(layer.tensors.values()))
    message = f"{len(found):,} of {expected:,} MTP tensors {kind}, first {tensor}{detail}."
    fix = (
        "What it drafts would not be accepted: "
        f"stoker build --base {checkpoint.directory} --mtp DIR_WITH_MTP --out NEW replaces the head; "
        "until then run with --draft none."
    )
    return Problem("error", message, checkpoint.tensors[tensor].file.name, tensor, fix)


class _TrunkSizes:
    """Typical sizes of the trunk's matrices, by kind, taken from layers spread over it."""

    def __init__(self, resolution: Resolution, reads: Reads) -> None:
        self._checkpoint, self._reads = resolution.checkpoint, reads
        self._layers: dict[str, list[LayerFormat]] = {}
        for place in resolution.places:
            if place.layer and not is_mtp(place.parameter):
                self._layers.setdefault(kind_of(place.module), []).append(place.layer)
        self._ranges: dict[str, tuple[float, float] | None] = {}

    def range(self, module: str) -> tuple[float, float] | None:
        """The plausible range of a matrix's rms; None if the trunk has no matrix of its kind."""
        kind = kind_of(module)
        if kind not in self._ranges:
            layers = self._layers.get(kind, []) if kind else []
            last = len(layers) - 1
            some = {(layer := layers[last * i // (SAMPLED - 1)]).name: layer for i in range(SAMPLED)} if layers else {}
            sizes = [size for _, layer in sorted(some.items()) if (size := _rms(self._sample(layer)))]
            factor = FACTOR if len(sizes) > 1 else FACTOR_OF_ONE
            self._ranges[kind] = (min(sizes) / factor, max(sizes) * factor) if sizes else None
        return self._ranges[kind]

    def _sample(self, layer: LayerFormat) -> list[Values]:
        if self._checkpoint.cut.intersection(layer.tensors.values()):
            return []
        return sample(layer, self._checkpoint.tensors, self._reads, SPOT)


def _fault(
    spots: list[Values], vector: bool, fresh: float, plausible: tuple[float, float] | None
) -> tuple[str, str] | None:
    if not all(np.isfinite(values).all() for values in spots):
        return "hold NaN or Inf", ""
    if vector and all((values == fresh).all() for values in spots):
        return None
    for values in spots:
        # a small tensor is sampled as one spot, and a part of it may never have been written
        for part in (values, *np.array_split(values, SPOTS)):
            if len(part) >= SMALLEST_SPOT and part.min() == part.max():
                return "are constant where sampled", f" ({part[0]:g})"
    rms = _rms(spots)
    if vector:
        return ("are implausibly large norms", f" (rms {rms:.3g})") if rms > LARGEST_NORM else None
    if plausible and not plausible[0] <= rms <= plausible[1]:
        low, high = plausible
        return (
            "are of implausible size",
            f" (rms {rms:.3g}, by the trunk's tensors of its kind {low:.3g} to {high:.3g})",
        )
    return None


def _rms(spots: Iterable[Values]) -> float:
    squares, count = 0.0, 0
    for values in spots:
        squares += float(np.square(values, dtype=np.float64).sum())
        count += len(values)
    return float(np.sqrt(squares / count)) if count and np.isfinite(squares) else 0.0
