"""Products of bf16 rows with a weight that was rearranged once, by torch's packed CPU kernels.

Each kind keeps the weight's exact values and rounds only sums. Which kind a weight gets is decided in `pack.py`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from stoker.backends.network.elementwise import VECTORS
from stoker.backends.network.linear import tiled

ROWS = 128  # rows of one call; `trial.py` compares all counts up to here
TILE = 16
LARGEST_FP16 = 15  # values stay below 2^15


class Product(Protocol):
    def __call__(self, x: Tensor, /) -> Tensor:
        """[T, in] bf16 -> [T, out] in bf16 or fp32, T <= 128."""

    @property
    def resident(self) -> int:
        """Bytes of the weight as it is read, which are not those of the checkpoint."""


@dataclass(frozen=True, eq=False)
class Int4Product:
    """INT4 codes with a scale per group of inputs; the kernel multiplies code * scale in fp32 and adds in fp32.

    It takes scales in bf16. Those that are not exact in bf16 are given as the sum of two, each beside a copy of the
    codes, and the row is multiplied with both.
    """

    packed: Tensor
    scales: Tensor  # [groups, out, 2] bf16: scale and zero point, which is 0
    group: int
    copies: int

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> "Int4Product":
        """codes [out, in] int32 0..15, standing for code - 8; scales [groups, out] fp32."""
        high = scales.bfloat16()
        low = (scales - high.float()).bfloat16()
        parts = [high, low] if bool(low.any()) else [high]
        whole = torch.cat(parts)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.repeat(1, len(parts)).contiguous(), 1)
        pairs = torch.stack([whole, torch.zeros_like(whole)], dim=-1).contiguous()
        return cls(packed, pairs, codes.shape[1] // scales.shape[0], len(parts))

    @property
    def resident(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if self.copies > 1:
            x = torch.cat([x] * self.copies, dim=1)
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), self.packed, self.group, self.scales)


@dataclass(frozen=True, eq=False)
class Bf16Product:
    """A weight in bf16, laid out for oneDNN. What one bf16 number cannot hold is the sum of two, side by side."""

    weight: Tensor
    copies: int
    resident: int

    @classmethod
    def of(cls, dense: Tensor) -> "Bf16Product":
        """dense [out, in]: exact in bf16, or in fp32 with up to 16 significant bits."""
        high = dense.bfloat16()
        low = (dense.float() - high.float()).bfloat16()
        parts = [high, low] if bool(low.any()) else [high]
        whole = torch.cat(parts, dim=1).contiguous()
        return cls(torch.ops.mkldnn._reorder_linear_weight(whole, 1), len(parts), whole.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if self.copies > 1:
            x = torch.cat([x] * self.copies, dim=1)
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.weight, None, "none", [], "")


@dataclass(frozen=True, eq=False)
class Fp16Product:
    """A weight in fp16, laid out for fbgemm, whose calls cost least: best for matrices that fit a core's cache.

    The kernel adds in fp32 and gives fp32. As above, a value may be the sum of two numbers. A power of two, taken back
    from the row, puts the values where fp16 has most room.
    """

    weight: torch.ScriptObject
    copies: int
    resident: int
    unscale: Tensor  # [copies, 1] fp32
    row_scale: Tensor | None = None  # [out] fp32

    @classmethod
    def of(cls, dense: Tensor, row_scale: Tensor | None = None) -> "Fp16Product | None":
        """dense [out, in] fp32; None where two fp16 numbers do not hold every value."""
        power = LARGEST_FP16 - int(torch.frexp(dense.abs().max().clamp(min=2.0**-100)).exponent)
        scaled = torch.ldexp(dense, torch.tensor(power))
        high = scaled.half().float()
        low = (scaled - high).half().float()
        if not torch.equal(high + low, scaled):
            return None
        parts = [high, low] if bool(low.any()) else [high]
        weight = torch.ops.quantized.linear_prepack_fp16(torch.cat(parts, dim=1), None)
        unscale = torch.full((len(parts), 1), 2.0**-power)
        return cls(weight, len(parts), 2 * len(parts) * dense.numel(), unscale, row_scale)

    def __call__(self, x: Tensor) -> Tensor:
        copies = (x.unsqueeze(1) * self.unscale).flatten(1)  # fp32
        out = torch.ops.quantized.linear_dynamic_fp16(copies, self.weight)
        return out if self.row_scale is None else out.mul_(self.row_scale)


@dataclass(frozen=True, eq=False)
class SmallProduct:
    """Few outputs: every row is a product of its own, in fp32. Routers and gates, whose precision matters."""

    weight: Tensor  # [in, outputs filled up to whole vectors] fp32
    outputs: int

    @classmethod
    def of(cls, dense: Tensor) -> "SmallProduct":
        filled = functional.pad(dense.float(), (0, 0, 0, -dense.shape[0] % VECTORS))
        return cls(filled.t().contiguous(), dense.shape[0])

    @property
    def resident(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        filled = torch.bmm(x.float().unsqueeze(1), self.weight.expand(x.shape[0], -1, -1)).squeeze(1)
        return filled.narrow(1, 0, self.outputs)


@dataclass(frozen=True, eq=False)
class TiledProduct:
    """fp32 in tiles of 16 rows: the reference's product with the values spelled out, where nothing faster holds."""

    weight: Tensor  # [out, in] fp32

    @property
    def resident(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return tiled(x.float(), self.weight, TILE)


@dataclass(frozen=True, eq=False)
class Packed:
    """One or several [out, in] weights of the same input, rows below each other, as one product."""

    product: Product
    sizes: tuple[int, ...]  # outputs of each

    @property
    def resident(self) -> int:
        """Bytes a step reads of it."""
        return self.product.resident

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, in] bf16 -> [T, sum of sizes] in `dtype`."""
        return by_rows(self.product, x).to(dtype)


def by_rows(product: Product, x: Tensor) -> Tensor:
    """Rows of a product are independent up to 128; more are taken 128 at a time."""
    if x.shape[0] <= ROWS:
        return product(x)
    return torch.cat([product(part) for part in x.split(ROWS)])
