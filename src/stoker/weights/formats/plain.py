"""BF16, FP16 and FP32 weights, stored as they are: norms, embeddings, fused experts and whatever was not quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stoker.weights.formats import layout
from stoker.weights.formats.base import WeightFormat


@dataclass(frozen=True, eq=False)
class Plain(WeightFormat):
    """A weight that was not quantised, of any shape."""

    weight: Tensor  # [.., out, in] bf16, fp16 or fp32

    CHECK: ClassVar[layout.Check] = staticmethod(layout.plain)

    def check_values(self, where: str) -> None:
        """There are no scales; `stoker inspect --verify` checks the values."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)
