"""Checks of values before a build: refuses an MTP head that was never filled and shared experts of another model.

Looks at a few rows per matrix; `stoker inspect --verify` reads every byte.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from stoker.checkpoint.build.convert import dequantized
from stoker.checkpoint.build.units import Rows
from stoker.errors import CheckpointError

SAMPLE = 128  # rows: one block of FP8 scales
# FP8 moves weights by 3 % of their norm, 4 bits by 10 %; weights of another training run by more than 100 %.
LARGEST_DIFFERENCE = 0.3


def refuse_dead_mtp(matrices: Iterable[Rows], where: str) -> None:
    """A head of zeros loads and drafts, and no draft is ever accepted: it looks like slow hardware."""
    for rows in matrices:
        values = _sample(rows)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{_place(rows)} of the MTP head holds NaN or Inf. {_cure(where)}")
        if bool((values == values.flatten()[0]).all()):
            value = float(values.flatten()[0])
            raise CheckpointError(
                f"{_place(rows)} of the MTP head is {value:g} everywhere: it was lost when this checkpoint was made, "
                f"and no draft of it would ever be accepted. {_cure(where)}"
            )


def refuse_foreign(replaced: Iterable[tuple[Rows, Rows]], option: str) -> None:
    """Shared experts of a sibling model have the same names and shapes; only their values differ."""
    for ours, theirs in replaced:
        a, b = _sample(ours), _sample(theirs)
        difference = float((a - b).norm() / a.norm().clamp(min=1e-12))
        if not difference <= LARGEST_DIFFERENCE:
            raise CheckpointError(
                f"{_place(theirs)} differs from {_place(ours)} by {difference:.0%} of its norm, where quantising "
                f"changes 3 to 10 %: {option} belongs to another model."
            )


def _sample(rows: Rows) -> Tensor:
    few = Rows(rows.layer, rows.tensors, rows.start, min(rows.stop, rows.start + SAMPLE), rows.matrix)
    return next(dequantized(few, SAMPLE * rows.columns, torch.float32))


def _place(rows: Rows) -> str:
    info = next(iter(rows.tensors.values()))
    return f"{info.name} in {info.file}"


def _cure(where: str) -> str:
    return f"Take the head from a whole checkpoint instead of {where}: --mtp DIR or --mtp hf:REPO."
