"""INT4 weights in the order the step kernels read them.

Reading checkpoints, asymmetric INT4 and prefill-sized products are elsewhere.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128  # inputs that share a scale
UNIT = 16  # output rows of one matrix-instruction operand
ROW_PADDING = 32  # programs take one or two units
MAX_TOKENS = 128  # rows of a step
COUNTERS_APART = 32  # a cache line, so that programs which count do not all go to one part of the cache
ZERO_POINT = 8


@dataclass(frozen=True, eq=False)
class PackedInt4:
    """Symmetric INT4 [.., out, in], w[o, i] = scales[i // 128, o] * (nibble - 8), blocked 16 rows by 128 inputs.

    A block is 16 rows of 64 bytes. The four nibbles of word p are inputs p, 32+p, 64+p and 96+p, lowest first: one
    mask turns two words, which lie side by side in a register, into the operand pair (p, p+1) of a matrix instruction.
    """

    packed: Tensor  # [.., rows/16, in/128, 16, 32] int16
    scales: Tensor  # [.., in/128, rows] fp16, signed; zero where rows exceed `out_features`
    counters: Tensor  # [rows/16 * 8, COUNTERS_APART] int32: programs done per block of rows and tokens, in column 0
    out_features: int

    @property
    def in_features(self) -> int:
        return self.packed.shape[-3] * GROUP

    @property
    def rows(self) -> int:
        return self.packed.shape[-4] * UNIT

    def __getitem__(self, index: int | Tensor) -> Self:
        """Some of the leading (expert) dimension."""
        return type(self)(self.packed[index], self.scales[index], self.counters, self.out_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[.., out, in]"""
        nibbles = torch.stack([self.packed >> 4 * j & 0xF for j in range(4)], dim=-2)  # [.., U, G, 16, 4, 32]
        codes = nibbles.flatten(-2).transpose(-2, -3).flatten(-4, -3)  # [.., rows, G, 128]
        w = (codes.float() - ZERO_POINT) * self.scales.float().transpose(-1, -2).unsqueeze(-1)
        return w.flatten(-2)[..., : self.out_features, :].to(dtype)


def pack_int4(qweight: Tensor, scales: Tensor) -> PackedInt4:
    """From the layout on disk: qweight [.., in/8, out] int32, scales [.., in/128, out] fp16.

    Nibble j of word r is input 8r + j, the lowest first. Join fused layers along `out` before packing.
    """
    _expect("qweight", qweight, torch.int32)
    _expect("scales", scales, torch.float16)
    *lead, words, out = qweight.shape
    if words * 8 % GROUP or words == 0:
        raise ValueError(f"qweight has {words} words of 8 inputs: {words * 8} inputs are no multiple of {GROUP}.")
    groups = words * 8 // GROUP
    if tuple(scales.shape) != (*lead, groups, out):
        raise ValueError(
            f"scales must be {[*lead, groups, out]} for a qweight of {list(qweight.shape)}, found {list(scales.shape)}."
        )
    quarters = qweight.unflatten(-2, (groups, 4, 4))  # [.., G, j, c, out]: inputs 32j + 8c + nibble
    by_nibble = []
    for i in range(8):
        word = quarters[..., 0, :, :] >> 4 * i & 0xF
        for j in range(1, 4):
            word = word | (quarters[..., j, :, :] >> 4 * i & 0xF) << 4 * j
        by_nibble.append(word.to(torch.int16))  # keeps the low 16 bits
    packed = torch.stack(by_nibble, dim=-2).flatten(-3, -2)  # [.., G, 32, out]
    extra = -out % ROW_PADDING
    packed = pad(packed, (0, extra)).unflatten(-1, (-1, UNIT))  # [.., G, 32, U, 16]
    dims = list(range(len(lead)))
    g, p, u, m = range(len(lead), len(lead) + 4)
    return PackedInt4(
        packed=packed.permute(*dims, u, g, m, p).contiguous(),
        scales=pad(scales, (0, extra)).contiguous(),
        counters=torch.zeros(
            (out + extra) // UNIT * (MAX_TOKENS // UNIT), COUNTERS_APART, dtype=torch.int32, device=qweight.device
        ),
        out_features=out,
    )


def _expect(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.dim() < 2:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name} must be {dtype} with 2 or more dimensions, found {found}.")
