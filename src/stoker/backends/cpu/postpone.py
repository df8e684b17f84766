"""Committed tokens a drafter has been shown but has not computed yet.

While drafting does not pay, running the drafter's network over every new token would still cost a few per cent of each
step. Its rows do not depend on how many are computed together, so they can wait and be caught up in one pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.family import PAGE_SIZE, Family
from stoker.backends.network.batch import Batch, Run

ROWS = 128  # of one pass in the step family


@dataclass(frozen=True)
class _Piece:
    start: int  # position of the first token
    pages: list[int]
    values: Tensor  # [n, ..] what the network reads of each token
    following: Tensor  # [n]


class Waiting:
    """Per slot, in the order of the text."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}
        self._counts: dict[int, int] = {}

    def add(self, batch: Batch, values: Tensor, following: Tensor) -> None:
        """Rows of `batch` with what belongs to each: values [T, ..] and the token that follows [T]."""
        starts, slots, cached = batch.starts.tolist(), batch.slots.tolist(), batch.cached.tolist()
        tables = batch.tables.tolist()
        for i, slot in enumerate(slots):
            rows = slice(starts[i], starts[i + 1])
            piece = _Piece(cached[i], tables[i], values[rows].clone(), following[rows].clone())
            self._pieces.setdefault(slot, []).append(piece)
            self._counts[slot] = self._counts.get(slot, 0) + starts[i + 1] - starts[i]

    def count(self, slot: int) -> int:
        return self._counts.get(slot, 0)

    def drop(self, slot: int) -> None:
        self._pieces.pop(slot, None)
        self._counts.pop(slot, None)

    def take(self, slots: Sequence[int]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Batches of at most 128 rows with their values and following tokens: as few as that allows, a slot's rows in
        order."""
        runs: list[Run] = []
        values: list[Tensor] = []
        following: list[Tensor] = []
        room = ROWS
        for slot in slots:
            pieces = self._pieces.get(slot)
            if not pieces:
                continue
            start, pages = pieces[0].start, pieces[-1].pages
            own, after = torch.cat([p.values for p in pieces]), torch.cat([p.following for p in pieces])
            self.drop(slot)
            first = 0
            while first < len(own):
                part = slice(first, first + room)
                # the network reads only positions, pages and values: what the tokens were is in the values
                runs.append(Run(after[part].tolist(), start + first, slot, pages))
                values.append(own[part])
                following.append(after[part])
                room -= len(values[-1])
                first += len(values[-1])
                if not room:
                    yield _together(runs, values, following)
                    runs, values, following, room = [], [], [], ROWS
        if runs:
            yield _together(runs, values, following)


def _together(runs: list[Run], values: list[Tensor], following: list[Tensor]) -> tuple[Batch, Tensor, Tensor]:
    return (
        Batch.of(Family.STEP, runs, PAGE_SIZE, values[0].device),
        torch.cat(values),
        torch.cat(following),
    )
