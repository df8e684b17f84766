"""Weights of every format in the order the step kernels read them (docs/gpu.md), and back again for references.

A block is 16 rows by 128 inputs, cut into quarters of 32 inputs. A tile is 16 rows by 32 words of 16 bits; it holds one
quarter in BF16, two in FP8 and INT8, four in INT4 and NVFP4, the first in the lowest bits.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 128  # inputs that share a scale
UNIT = 16  # output rows of one matrix-instruction operand
ROW_PADDING = 32  # programs take one or two units
QUARTER = 32
ZERO_POINT = 8  # of INT4
NVFP4_GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; bit 3 is the sign


class Kind(IntEnum):
    """Numbers that kernels know a format by."""

    INT4 = 0
    BF16 = 1
    FP8 = 2
    INT8 = 3
    NVFP4 = 4

    @property
    def tiles(self) -> int:
        """Of a block."""
        return {Kind.INT4: 1, Kind.NVFP4: 1, Kind.FP8: 2, Kind.INT8: 2, Kind.BF16: 4}[self]


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [.., out, in]; leading dimensions are experts."""

    kind: Kind
    packed: Tensor  # [.., rows/16, in/128, tiles, 16, 32] bf16 for BF16, else int16
    scales: (
        Tensor  # INT4 [.., in/128, rows] fp16; FP8 [.., in/128, rows/16] fp32; NVFP4 [.., rows/16, in/128, 64] int32
    )
    row_scales: Tensor  # INT8, NVFP4 [.., rows] fp32
    out_features: int

    @property
    def in_features(self) -> int:
        return self.packed.shape[-4] * GROUP

    @property
    def rows(self) -> int:
        return self.packed.shape[-5] * UNIT

    @property
    def nbytes(self) -> int:
        tensors = [self.packed]
        tensors += [self.scales] if self.kind in (Kind.INT4, Kind.FP8, Kind.NVFP4) else []
        tensors += [self.row_scales] if self.kind in (Kind.INT8, Kind.NVFP4) else []
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __getitem__(self, index: int | Tensor) -> Self:
        """Some of the leading (expert) dimension."""
        parts = (self.packed[index], self.scales[index], self.row_scales[index])
        return type(self)(self.kind, *parts, self.out_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[.., out, in]"""
        values = _values(self)  # [.., U, 16, G, 128]
        if self.kind is Kind.INT4:
            values = values * self.scales.float().transpose(-1, -2).unflatten(-2, (-1, UNIT)).unsqueeze(-1)
        elif self.kind is Kind.FP8:
            values = values * self.scales.transpose(-1, -2)[..., None, :, None]
        elif self.kind is Kind.NVFP4:
            values = values * _nvfp4_scales(self.scales)
        if self.kind in (Kind.INT8, Kind.NVFP4):
            values = values * self.row_scales.unflatten(-1, (-1, UNIT))[..., None, None]
        return values.flatten(-2).flatten(-3, -2)[..., : self.out_features, :].to(dtype)


def empty_weight(kind: Kind, lead: tuple[int, ...], out: int, inputs: int, device: torch.device | str) -> PackedWeight:
    """Of the sizes that packing a weight [*lead, out, inputs] gives."""
    rows, groups = out + -out % ROW_PADDING, inputs // GROUP
    units = rows // UNIT

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(*lead, *shape, dtype=dtype, device=device)

    packed = empty(torch.bfloat16 if kind is Kind.BF16 else torch.int16, units, groups, kind.tiles, UNIT, QUARTER)
    if kind is Kind.BF16:
        return PackedWeight(kind, packed, packed, packed, out)
    row_scales = empty(torch.float32, rows) if kind in (Kind.INT8, Kind.NVFP4) else None
    if kind is Kind.INT4:
        scales = empty(torch.float16, groups, rows)
    elif kind is Kind.FP8:
        scales = empty(torch.float32, groups, units)
    elif kind is Kind.NVFP4:
        scales = empty(torch.int32, units, groups, 4 * UNIT)
    else:
        assert row_scales is not None
        scales = row_scales
    return PackedWeight(kind, packed, scales, scales if row_scales is None else row_scales, out)


def pack_int4(qweight: Tensor, scales: Tensor) -> PackedWeight:
    """Symmetric INT4, w[o, i] = scales[i // 128, o] * (nibble - 8), from the layout on disk: qweight [.., in/8, out]
    int32, scales [.., in/128, out] fp16.

    Nibble j of word r is input 8r + j, the lowest first. Join fused layers along `out` before packing. The four nibbles
    of a packed word p are inputs p, 32 + p, 64 + p and 96 + p, lowest first: one mask turns two words, which lie side
    by side in a register, into the operand pair (p, p + 1) of a matrix instruction.
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
    scales = pad(scales, (0, extra)).contiguous()
    return PackedWeight(Kind.INT4, packed.permute(*dims, u, g, m, p).unsqueeze(-3).contiguous(), scales, scales, out)


def pack_bf16(weight: Tensor) -> PackedWeight:
    """[.., out, in] bf16."""
    _expect("weight", weight, torch.bfloat16)
    packed = _quarters(weight).contiguous()
    return PackedWeight(Kind.BF16, packed, packed, packed, weight.shape[-2])


def pack_fp8(weight: Tensor, scale: Tensor) -> PackedWeight:
    """[.., out, in] E4M3 with a scale per 128 x 128 block [.., ceil(out/128), in/128], which multiplies."""
    _expect("weight", weight, torch.float8_e4m3fn)
    *lead, out, inputs = weight.shape
    expected = [*lead, -(-out // GROUP), inputs // GROUP]
    if list(scale.shape) != expected:
        raise ValueError(f"scale must be {expected} for a weight of {list(weight.shape)}, found {list(scale.shape)}.")
    units = (out + -out % ROW_PADDING) // UNIT
    per_unit = scale.float().repeat_interleave(GROUP // UNIT, -2)[..., :units, :]
    per_unit = pad(per_unit, (0, 0, 0, units - per_unit.shape[-2])).transpose(-1, -2).contiguous()
    return PackedWeight(Kind.FP8, _bytes(weight.view(torch.uint8)), per_unit, per_unit, out)


def pack_int8(weight: Tensor, scale: Tensor) -> PackedWeight:
    """[.., out, in] int8 with a scale per row, [.., out] or [.., out, 1]."""
    _expect("weight", weight, torch.int8)
    out = weight.shape[-2]
    rows = _row_scales(scale.float().reshape(weight.shape[:-1]))
    return PackedWeight(Kind.INT8, _bytes(weight.view(torch.uint8)), rows, rows, out)


def pack_nvfp4(codes: Tensor, scale: Tensor, factor: Tensor) -> PackedWeight:
    """codes [.., out, in/2] uint8, the even input low; scale [.., out, in/16] E4M3; factor [.., out] fp32."""
    _expect("codes", codes, torch.uint8)
    out = codes.shape[-2]
    nibbles = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)
    bits = pad(scale.view(torch.uint8).int(), (0, 0, 0, -out % ROW_PADDING))
    bits = bits.unflatten(-2, (-1, UNIT)).unflatten(-1, (-1, 4, 2))  # [.., U, 16, G, quarter, half]
    # one word per lane (row, c): byte j is the scale of inputs 32 j + 8 c ..., which lie in half c // 2 of quarter j
    bits = bits.transpose(-4, -3).transpose(-2, -1).repeat_interleave(2, -2)  # [.., U, G, 16, c, quarter]
    words = bits[..., 0] | bits[..., 1] << 8 | bits[..., 2] << 16 | bits[..., 3] << 24
    return PackedWeight(Kind.NVFP4, _nibbles(nibbles), words.flatten(-2).contiguous(), _row_scales(factor), out)


def join_rows(*weights: PackedWeight) -> PackedWeight:
    """Weights of one format and one input, one above the other; all parts but the last have whole blocks of rows."""
    first = weights[0]
    for weight in weights:
        if weight.kind is not first.kind:
            raise ValueError(f"weights to join must be of one format, found {first.kind.name} and {weight.kind.name}.")
    if any(weight.out_features != weight.rows for weight in weights[:-1]):
        raise ValueError(
            f"parts must have a multiple of {ROW_PADDING} rows, found {[w.out_features for w in weights]}."
        )
    packed = torch.cat([w.packed for w in weights], dim=-5)
    scales = row_scales = packed
    if first.kind in (Kind.INT4, Kind.FP8):
        scales = row_scales = torch.cat([w.scales for w in weights], dim=-1)
    elif first.kind is not Kind.BF16:
        row_scales = torch.cat([w.row_scales for w in weights], dim=-1)
        scales = row_scales if first.kind is Kind.INT8 else torch.cat([w.scales for w in weights], dim=-3)
    return PackedWeight(first.kind, packed, scales, row_scales, sum(w.out_features for w in weights))


def _quarters(values: Tensor) -> Tensor:
    """[.., out, in] -> [.., rows/16, in/128, 4, 16, 32], rows filled up with zeros."""
    out, inputs = values.shape[-2:]
    if inputs % GROUP:
        raise ValueError(f"the weight has {inputs} inputs, which are no multiple of {GROUP}.")
    values = pad(values, (0, 0, 0, -out % ROW_PADDING))
    values = values.unflatten(-2, (-1, UNIT)).unflatten(-1, (-1, 4, QUARTER))  # [.., U, 16, G, 4, 32]
    return values.movedim(-4, -2)


def _bytes(codes: Tensor) -> Tensor:
    quarters = _quarters(codes)
    low, high = quarters[..., 0::2, :, :].int(), quarters[..., 1::2, :, :].int()
    return (low | high << 8).to(torch.int16).contiguous()


def _nibbles(codes: Tensor) -> Tensor:
    quarters = _quarters(codes).int()
    word = quarters[..., 0, :, :]
    for j in range(1, 4):
        word = word | quarters[..., j, :, :] << 4 * j
    return word.to(torch.int16).unsqueeze(-3).contiguous()


def _row_scales(scale: Tensor) -> Tensor:
    return pad(scale.float(), (0, -scale.shape[-1] % ROW_PADDING)).contiguous()


def _values(weight: PackedWeight) -> Tensor:
    """fp32 [.., rows/16, 16, in/128, 128] before any scale."""
    packed = weight.packed
    if weight.kind is Kind.BF16:
        quarters = packed.float()
    else:
        bits = 16 * weight.kind.tiles // 4
        parts = [packed.int() >> bits * j & (1 << bits) - 1 for j in range(16 // bits)]
        codes = torch.stack(parts, dim=-3).flatten(-4, -3)  # [.., U, G, 4, 16, 32]
        quarters = _decoded(codes, weight.kind)
    return quarters.movedim(-2, -4).flatten(-2)


def _decoded(codes: Tensor, kind: Kind) -> Tensor:
    if kind is Kind.INT4:
        return codes.float() - ZERO_POINT
    if kind is Kind.NVFP4:
        return torch.tensor(E2M1 + tuple(-v for v in E2M1), device=codes.device)[codes]
    raw = codes.to(torch.uint8)
    return (raw.view(torch.float8_e4m3fn) if kind is Kind.FP8 else raw.view(torch.int8)).float()


def _nvfp4_scales(words: Tensor) -> Tensor:
    """[.., rows/16, 16, in/128, 128]"""
    lanes = words.unflatten(-1, (UNIT, 4))  # [.., U, G, 16, c]
    found = torch.stack([lanes >> 8 * j & 0xFF for j in range(4)], dim=-2)  # [.., U, G, 16, quarter, c]
    values = found.to(torch.uint8).view(torch.float8_e4m3fn).float().repeat_interleave(8, -1)
    return values.flatten(-2).transpose(-2, -3)


def _expect(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.dim() < 2:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name} must be {dtype} with 2 or more dimensions, found {found}.")
