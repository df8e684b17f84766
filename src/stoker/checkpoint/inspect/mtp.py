"""Is the MTP head there, whole, and made of weights? A head of zeros loads and drafts, and no draft is accepted.

Every tensor of it is sampled: finite, not constant, and, for matrices, of a size like the trunk's tensors of its kind.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stoker.checkpoint.inspect.model import Demand
from stoker.checkpoint.inspect.sample import SPOTS, Values, sample
from stoker.weights.files import Files
from stoker.weights.formats.rules import FormatTable
from stoker.weights.headers import Reads
from stoker.weights.model_config import ModelConfig
from stoker.weights.problems import Problem
from stoker.weights.resolve import EXPERTS, MTP_PREFIX

SPOT, EXPERT_SPOT = 64 << 10, 4 << 10  # bytes per spot and tensor; experts are many and alike
# Between the rms of an MTP matrix and of its kin in several trunk layers; layers differ, so one alone says less. Noise
# and forgotten scales are off by more than either.
FACTOR, FACTOR_OF_ONE = 16.0, 128.0
KIN = 4  # trunk matrices of a kind that are sampled
LARGEST_NORM = 1e3  # norm weights have no such kin, but none is of this size
SMALLEST_SPOT = 16  # values; fewer may be equal by chance


@dataclass(frozen=True)
class MtpReport:
    present: bool
    complete: bool
    sane: bool | None  # None: there is nothing to judge
    found: int  # weights, of `expected`
    expected: int
    sampled_bytes: int
    problems: tuple[Problem, ...] = ()


def inspect_mtp(config: ModelConfig, wanted: Demand, files: Files, table: FormatTable, reads: Reads) -> MtpReport:
    expected, missing = wanted.of_mtp(wanted.modules), wanted.of_mtp(wanted.missing)
    stored = [module for module in expected if module in table.layers]
    before = reads.count
    right = [module for module in stored if table.layers[module].shape == wanted.modules[module]]
    whole = [module for module in right if not files.cut.intersection(table.layers[module].tensors.values())]
    if not stored:
        return MtpReport(False, False, None, 0, len(expected), 0)
    kin = _Kin(wanted, files, table, reads)
    fresh = 0.0 if config.norm_offset else 1.0  # a norm that changes nothing, as it is before training
    faults: dict[str, list[tuple[str, str]]] = {}
    for module in whole:
        spots = sample(table.layers[module], files.tensors, reads, EXPERT_SPOT if EXPERTS in module else SPOT)
        if fault := _fault(spots, len(table.layers[module].shape) < 2, fresh, kin.range(module)):
            faults.setdefault(fault[0], []).append((module, fault[1]))
    problems = []
    for kind, found in faults.items():
        tensor = next(iter(table.layers[found[0][0]].tensors.values()))
        message = f"{len(found):,} of {len(expected):,} MTP tensors {kind}, first {tensor}{found[0][1]}."
        fix = (
            f"What it drafts would not be accepted: stoker build --base {files.directory} --mtp DIR_WITH_MTP --out NEW "
            "replaces the head; until then run with --draft none."
        )
        problems.append(Problem("error", message, files.tensors[tensor].file.name, tensor, fix))
    return MtpReport(
        present=True,
        complete=not missing and len(whole) == len(expected),
        sane=not faults if whole else None,
        found=len(expected) - len(missing),
        expected=len(expected),
        sampled_bytes=reads.count - before,
        problems=tuple(problems),
    )


class _Kin:
    """Typical sizes of the trunk's matrices, by kind, taken from layers spread over it."""

    def __init__(self, wanted: Demand, files: Files, table: FormatTable, reads: Reads) -> None:
        self._files, self._table, self._reads = files, table, reads
        pattern = re.compile(r"(?:^|\.)layers\.\d+\.(.*)")
        self._modules: dict[str, list[str]] = {}
        for module in wanted.modules:
            match = pattern.search(module)
            if match and module in table.layers and not module.startswith(MTP_PREFIX):
                self._modules.setdefault(_kind(match[1]), []).append(module)
        self._ranges: dict[str, tuple[float, float] | None] = {}

    def range(self, module: str) -> tuple[float, float] | None:
        """Between what rms a matrix like this one is plausible; None where there are none to go by."""
        kind = _kind(module.removeprefix("mtp.layers.0.").removeprefix(MTP_PREFIX))
        kind = "self_attn.o_proj" if kind == "fc" else kind  # fc too yields a hidden state
        if kind not in self._ranges:
            modules = self._modules.get(kind, [])
            last = len(modules) - 1
            some = {modules[last * i // (KIN - 1)] for i in range(KIN)} if modules else set()
            sizes = [size for m in sorted(some) if (size := _rms(self._sample(m)))]
            factor = FACTOR if len(sizes) > 1 else FACTOR_OF_ONE
            self._ranges[kind] = (min(sizes) / factor, max(sizes) * factor) if sizes else None
        return self._ranges[kind]

    def _sample(self, module: str) -> list[Values]:
        layer = self._table.layers[module]
        if self._files.cut.intersection(layer.tensors.values()):
            return []
        return sample(layer, self._files.tensors, self._reads, SPOT)


def _kind(name: str) -> str:
    """mlp.experts.7.up_proj and the fused mlp.experts.gate_up_proj are of one kind."""
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    return re.sub(r"\.experts\.(gate|up)_proj", ".experts.gate_up_proj", name)


def _fault(
    spots: list[Values], vector: bool, fresh: float, plausible: tuple[float, float] | None
) -> tuple[str, str] | None:
    if not all(np.isfinite(values).all() for values in spots):
        return "hold NaN or Inf", ""
    if vector and all((values == fresh).all() for values in spots):
        return None
    for values in spots:
        # a small tensor comes as one spot, of which a part may never have been written
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
