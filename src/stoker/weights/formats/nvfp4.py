"""NVFP4: E2M1 nibbles, an E4M3 scale per 16 inputs and one fp32 scale per tensor.

Two consecutive inputs share a byte, the even one in the low nibble. Two spellings exist, alike but for the
last scale: compressed-tensors' global scale divides, ModelOpt's multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import Tensor

from stoker.errors import CheckpointError
from stoker.weights.formats import layout
from stoker.weights.formats.base import SCALE_OF_ZEROS, WeightFormat, expect_finite, expect_quantizable
from stoker.weights.formats.fp8 import E4M3_MAX
from stoker.weights.formats.layout import NVFP4_GROUP

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; bit 3 is the sign
E2M1_MAX = 6.0
SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True, eq=False)
class Nvfp4(WeightFormat):
    """compressed-tensors `nvfp4-pack-quantized`: w = e2m1 * weight_scale / weight_global_scale."""

    weight_packed: Tensor  # [.., out, in/2] uint8
    weight_scale: Tensor  # [.., out, in/16] float8_e4m3fn
    weight_global_scale: Tensor  # [.., 1] fp32, a divisor
    input_global_scale: Tensor | None = None  # [.., 1] fp32, only where activations are quantised

    CHECK: ClassVar[layout.Check] = staticmethod(layout.nvfp4_ct)

    def check_values(self, where: str) -> None:
        for suffix in ("weight_scale", "weight_global_scale", "input_global_scale"):
            expect_finite(getattr(self, suffix), suffix, where)
        if not self.weight_global_scale.is_meta and not bool(self.weight_global_scale.all()):
            raise CheckpointError(
                f"{where}: weight_global_scale is 0 and the weight is divided by it; the file is broken."
            )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        lead = self.weight_packed.shape[:-2]
        scale = self.weight_scale.float() / self.weight_global_scale.reshape(*lead, 1, 1)  # [.., out, in/16]
        return _dequantize(self.weight_packed, scale).to(dtype)

    @classmethod
    def quantize(cls, weight: Tensor, *, where: str = "weight") -> Self:
        expect_quantizable(weight, "NVFP4", multiple_of=NVFP4_GROUP, where=where)
        w = weight.float()
        global_scale = E4M3_MAX * E2M1_MAX / w.abs().amax((-2, -1), keepdim=True)  # [.., 1, 1]
        global_scale = torch.where(global_scale.isfinite(), global_scale, SCALE_OF_ZEROS)
        scale = _to_e4m3(_group_amax(w) / E2M1_MAX * global_scale)
        packed = _pack(w, scale.float() / global_scale)
        return cls(weight_packed=packed, weight_scale=scale, weight_global_scale=global_scale[..., 0])


@dataclass(frozen=True, eq=False)
class Nvfp4ModelOpt(WeightFormat):
    """ModelOpt: w = e2m1 * weight_scale * weight_scale_2, where weight_scale_2 = amax / 2688."""

    weight: Tensor  # [.., out, in/2] uint8
    weight_scale: Tensor  # [.., out, in/16] float8_e4m3fn
    weight_scale_2: Tensor  # [..] fp32, a factor
    input_scale: Tensor | None = None  # [..] fp32

    CHECK: ClassVar[layout.Check] = staticmethod(layout.nvfp4_modelopt)

    def check_values(self, where: str) -> None:
        for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
            expect_finite(getattr(self, suffix), suffix, where)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        lead = self.weight.shape[:-2]
        scale = self.weight_scale.float() * self.weight_scale_2.reshape(*lead, 1, 1)  # [.., out, in/16]
        return _dequantize(self.weight, scale).to(dtype)

    @classmethod
    def quantize(cls, weight: Tensor, *, where: str = "weight") -> Self:
        expect_quantizable(weight, "NVFP4", multiple_of=NVFP4_GROUP, where=where)
        w = weight.float()
        scale_2 = w.abs().amax((-2, -1)) / (E4M3_MAX * E2M1_MAX)  # [..]
        scale_2 = torch.where(scale_2 > 0, scale_2, SCALE_OF_ZEROS)
        spread = scale_2[..., None, None]  # [.., 1, 1]
        scale = _to_e4m3(_group_amax(w) / (E2M1_MAX * spread))
        packed = _pack(w, scale.float() * spread)
        return cls(weight=packed, weight_scale=scale, weight_scale_2=scale_2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """[.., n] bytes -> [.., 2n] values, in fp32."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)  # [.., 2n], low nibble first
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=packed.device)
    return table[codes.int()]


def round_e2m1(x: Tensor) -> Tensor:
    """Codes of the nearest E2M1 values as uint8, ties to the even code, magnitudes above 6 clipped."""
    # A value goes up one code above each midpoint; *at* a midpoint only where that lands on an even code.
    bounds = torch.tensor(_midpoints(), device=x.device)
    code = torch.bucketize(x.abs(), bounds).to(torch.uint8)
    return code | ((x < 0).to(torch.uint8) << 3)


def _midpoints() -> list[float]:
    """Seven bounds. bucketize counts those below a value, so one that itself rounds up moves down one float."""
    midpoints = [(low + high) / 2 for low, high in pairwise(E2M1)]
    one_below = [float(torch.nextafter(torch.tensor(m), torch.tensor(0.0))) for m in midpoints]
    return [one_below[i] if i % 2 else m for i, m in enumerate(midpoints)]


def _group_amax(w: Tensor) -> Tensor:
    return w.unflatten(-1, (-1, NVFP4_GROUP)).abs().amax(-1)  # [.., out, in/16]


def _to_e4m3(scale: Tensor) -> Tensor:
    # The floor keeps a group that is tiny next to the tensor's largest value from a scale of zero.
    return scale.clamp(SMALLEST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn)


def _pack(w: Tensor, scale: Tensor) -> Tensor:
    """`w` [.., out, in] over `scale` [.., out, in/16] -> bytes [.., out, in/2]."""
    codes = round_e2m1(w.unflatten(-1, (-1, NVFP4_GROUP)) / scale[..., None]).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    values = unpack_e2m1(packed).unflatten(-1, (-1, NVFP4_GROUP))  # [.., out, in/16, 16]
    return (values * scale[..., None]).flatten(-2)
