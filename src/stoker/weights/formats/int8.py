"""INT8 with one scale per output row, symmetric: the LM head at half its BF16 bytes.

w[o, i] = weight[o, i] * weight_scale[o]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from stoker.weights.formats import layout
from stoker.weights.formats.base import SCALE_OF_ZEROS, WeightFormat, expect_finite, expect_quantizable

INT8_MAX = 127  # -128 is left unused, so that a row and its negative quantise alike


@dataclass(frozen=True, eq=False)
class Int8Row(WeightFormat):
    """Per-row INT8."""

    weight: Tensor  # [.., out, in] int8
    weight_scale: Tensor  # [.., out, 1] fp32 as written here; [.., out], bf16 and fp16 are read too

    CHECK: ClassVar[layout.Check] = staticmethod(layout.int8_row)

    def check_values(self, where: str) -> None:
        expect_finite(self.weight_scale, "weight_scale", where)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        scale = self.weight_scale.float().reshape(*self.weight.shape[:-1], 1)  # [.., out, 1]
        return self.weight.float().mul_(scale).to(dtype)

    @classmethod
    def quantize(cls, weight: Tensor, *, where: str = "weight") -> Self:
        """Round each row of `weight` [.., out, in] to 255 levels spanning its largest magnitude."""
        expect_quantizable(weight, "INT8", where=where)
        w = weight.float()
        scale = w.abs().amax(-1, keepdim=True) / INT8_MAX  # [.., out, 1]
        scale.masked_fill_(scale == 0, SCALE_OF_ZEROS)
        codes = (w / scale).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
        return cls(weight=codes, weight_scale=scale)
