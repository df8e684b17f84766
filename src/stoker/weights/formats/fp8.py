"""FP8 E4M3 weights, scaled per 128x128 block (Qwen), per tensor (ModelOpt) or per row (compressed-tensors).

All scales multiply; the "inv" in `weight_scale_inv` is a name only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from stoker.weights.formats import layout
from stoker.weights.formats.base import SCALE_OF_ZEROS, WeightFormat, expect_finite, expect_quantizable
from stoker.weights.formats.layout import FP8_BLOCK

E4M3_MAX = 448.0


@dataclass(frozen=True, eq=False)
class Fp8Block(WeightFormat):
    """w[o, i] = weight[o, i] * weight_scale_inv[o // 128, i // 128]; edge blocks may be short."""

    weight: Tensor  # [.., out, in] float8_e4m3fn
    weight_scale_inv: Tensor  # [.., ceil(out/128), ceil(in/128)] bf16, fp16 or fp32

    CHECK: ClassVar[layout.Check] = staticmethod(layout.fp8_block)

    def check_values(self, where: str) -> None:
        expect_finite(self.weight_scale_inv, "weight_scale_inv", where)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        w = self.weight.float()  # [.., out, in]
        return w.mul_(_spread(self.weight_scale_inv.float(), *w.shape[-2:])).to(dtype)

    @classmethod
    def quantize(cls, weight: Tensor, *, scale_dtype: torch.dtype = torch.bfloat16, where: str = "weight") -> Self:
        """Round each block by the smallest power of two that keeps it within 448.

        A power of two costs a floating-point format no precision, and every weight is then exact in bf16 too.
        """
        expect_quantizable(weight, "FP8", where=where)
        w = weight.float()
        n_out, n_in = w.shape[-2:]
        padded = pad(w, (0, -n_in % FP8_BLOCK, 0, -n_out % FP8_BLOCK))
        blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))  # [.., bo, r, bi, c]
        fraction, power = torch.frexp(blocks.abs().amax((-3, -1)) / E4M3_MAX)  # [.., bo, bi]
        scale = torch.ldexp(torch.ones_like(fraction), power - (fraction == 0.5).int()).to(scale_dtype)
        scale.masked_fill_((fraction == 0) | (scale == 0), SCALE_OF_ZEROS)
        # A scale too small for its type may push values past 464, where some casts give NaN.
        codes = (w / _spread(scale.float(), n_out, n_in)).clamp_(-E4M3_MAX, E4M3_MAX)
        return cls(weight=codes.to(torch.float8_e4m3fn), weight_scale_inv=scale)


@dataclass(frozen=True, eq=False)
class Fp8Tensor(WeightFormat):
    """w = weight * weight_scale. `input_scale` is for quantised activations, which Stoker does not use."""

    weight: Tensor  # [.., out, in] float8_e4m3fn
    weight_scale: Tensor  # [] or [1] fp32
    input_scale: Tensor | None = None  # [] or [1] fp32

    CHECK: ClassVar[layout.Check] = staticmethod(layout.fp8_tensor)

    def check_values(self, where: str) -> None:
        expect_finite(self.weight_scale, "weight_scale", where)
        expect_finite(self.input_scale, "input_scale", where)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        w = self.weight.float()
        return w.mul_(self.weight_scale.reshape(*w.shape[:-2], 1, 1)).to(dtype)


@dataclass(frozen=True, eq=False)
class Fp8Row(WeightFormat):
    """w[o, i] = weight[o, i] * weight_scale[o]: compressed-tensors' float-quantized, one scale per channel."""

    weight: Tensor  # [.., out, in] float8_e4m3fn
    weight_scale: Tensor  # [.., out, 1] or [.., out] bf16, fp16 or fp32

    CHECK: ClassVar[layout.Check] = staticmethod(layout.fp8_row)

    def check_values(self, where: str) -> None:
        expect_finite(self.weight_scale, "weight_scale", where)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        scale = self.weight_scale.float().reshape(*self.weight.shape[:-1], 1)  # [.., out, 1]
        return self.weight.float().mul_(scale).to(dtype)


def _spread(scale: Tensor, n_out: int, n_in: int) -> Tensor:
    """One scale per element, [.., out, in], from one per block."""
    rows = scale.repeat_interleave(FP8_BLOCK, -2)[..., :n_out, :]
    return rows.repeat_interleave(FP8_BLOCK, -1)[..., :n_in]
