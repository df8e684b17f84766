"""Several weights as one, rows below each other: gate and up projections of experts that are stored apart.

Kept apart in memory too: scales of a block, or of a whole tensor, do not carry over from one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.weights.formats.base import WeightFormat
from stoker.weights.formats.layout import Shape


@dataclass(frozen=True, eq=False)
class Joined:
    parts: tuple[WeightFormat, ...]  # each [.., out, in], of the same in

    @property
    def shape(self) -> Shape:
        *experts, _, inputs = self.parts[0].shape
        return (*experts, sum(part.shape[-2] for part in self.parts), inputs)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, index: int | Tensor) -> Joined:
        return Joined(tuple(part[index] for part in self.parts))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([part.dequantize(dtype) for part in self.parts], dim=-2)
