"""INT4 as compressed-tensors packs it (pack-quantized, symmetric), and the same weight in GPTQ's order.

    w[o, i] = weight_scale[o, i // group] * (nibble(o, i) - 8)

Codes, their order in a word and the zero point are those of `int4`; only rows and columns are swapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stoker.errors import CheckpointError
from stoker.weights.formats import layout
from stoker.weights.formats.base import WeightFormat, expect_finite
from stoker.weights.formats.int4 import ZERO_POINT, Int4, unpack_nibbles
from stoker.weights.formats.layout import INT4_GROUPS


@dataclass(frozen=True, eq=False)
class Int4Ct(WeightFormat):
    """Groups of 128, 64 or 32 consecutive inputs, or one scale per row."""

    weight_packed: Tensor  # [.., out, in/8] int32; nibble j of word r, least significant first, is input 8r + j
    weight_scale: Tensor  # [.., out, in/group] bf16, fp16 or fp32
    weight_shape: Tensor | None = None  # [.., 2]: out, in

    CHECK: ClassVar[layout.Check] = staticmethod(layout.int4_ct)

    def check_values(self, where: str) -> None:
        expect_finite(self.weight_scale, "weight_scale", where)
        if self.weight_shape is None or self.weight_shape.is_meta:
            return
        stored = (self.weight_packed.shape[-2], self.weight_packed.shape[-1] * 8)
        for said in self.weight_shape.reshape(-1, 2).tolist():
            if tuple(said) != stored:
                raise CheckpointError(
                    f"{where}: weight_shape is {said} and weight_packed holds {list(stored)} values of 4 bits: this is "
                    "another width than INT4, or its last inputs are padding; Stoker reads whole INT4 groups."
                )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_nibbles(self.weight_packed.transpose(-1, -2)).transpose(-1, -2)  # [.., out, in]
        groups = codes.unflatten(-1, (self.weight_scale.shape[-1], -1))
        w = (groups.float() - ZERO_POINT).mul_(self.weight_scale.float().unsqueeze(-1))
        return w.flatten(-2).to(dtype).contiguous()

    def in_gptq_order(self) -> Int4 | None:
        """The same weight as the kernels read it, or None where a scale is too small or too large for fp16."""
        scale = self.weight_scale.half()
        if not scale.is_meta and not torch.equal(scale.float(), self.weight_scale.float()):
            return None
        inputs = self.weight_packed.shape[-1] * 8
        if scale.shape[-1] == 1:  # one scale per row is the same scale in every group
            group = next(size for size in INT4_GROUPS if inputs % size == 0)
            scale = scale.expand(*scale.shape[:-1], inputs // group)
        return Int4(self.weight_packed.transpose(-1, -2).contiguous(), scale.transpose(-1, -2).contiguous())
