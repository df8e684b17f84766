# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rows in bf16 times blocks of 64 outputs whose weights are decoded in registers, two inputs at a time: the processor's
own instruction for pairs of bf16 numbers where it has one, two multiplications in fp32 where not.

A sum goes over its inputs from the first to the last, however many rows are computed together.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range, get_or_insert_function
from numba.extending import intrinsic
from torch import Tensor

from stoker.backends.cpu.kernels.compiled import bf16s, compiled, floats, narrow, widen
from stoker.backends.cpu.kernels.strips import BLOCK, LANES, STRIP, WORD, groups
from stoker.backends.cpu.ops.linear import Weight, as_tensor
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int4 import ZERO_POINT, Int4, unpack_nibbles
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.layout import FP8_BLOCK

INT4, BF16 = 1, 4  # bytes of two weights
MOST = 6  # rows whose sums fit into registers
DOTS = bool(binding.get_host_cpu_features().get("avx512bf16"))
NUMBER = 2 if DOTS else 4  # bytes of a number of a row: without that instruction they are bf16 numbers kept as fp32


class _Bfloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite has no name for."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_Bfloat._create_instance()


@dataclass(frozen=True, eq=False)
class Blocks:
    """Matrices [E, out, in] in blocks of 64 outputs; two inputs of an output lie side by side."""

    codes: Tensor  # [E, blocks, in / 2, 64] uint8, signed codes, the even input's in the low half; or [.., 64, 2] bf16
    scales: Tensor  # [E, blocks, in / group, 64] fp32
    group: int

    @classmethod
    def of(cls, *weights: Weight, order: Tensor | None = None) -> "Blocks | None":
        """Weights [.., out, in] of the same input, outputs behind each other, then in `order`; None where neither INT4
        nor bf16 with a scale holds them all."""
        found = _int4(weights) or _scaled(weights)
        if found is None:
            return None
        codes, scales, group = found  # [.., in, out], [.., groups, out]
        if order is not None:
            codes, scales = codes[..., order], scales[..., order]
        if codes.shape[-1] % BLOCK or group % STRIP:
            return None
        if codes.dtype == torch.uint8:
            paired = _blocks(codes[..., 0::2, :] | codes[..., 1::2, :] << 4)
        else:
            paired = torch.stack([_blocks(codes[..., half::2, :]) for half in range(2)], dim=-1)
        return cls(paired.contiguous(), _blocks(scales.float()).contiguous(), group)

    @cached_property
    def kind(self) -> int:
        return INT4 if self.codes.dtype == torch.uint8 else BF16

    @cached_property
    def inputs(self) -> int:
        return int(self.scales.shape[-2]) * self.group

    @cached_property
    def outputs(self) -> int:
        return int(self.scales.shape[-3]) * BLOCK

    @cached_property
    def arguments(self) -> tuple[int, int, int, int]:
        """What a kernel is told of it."""
        return self.codes.data_ptr(), self.scales.data_ptr(), self.group, self.kind

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def _blocks(x: Tensor) -> Tensor:
    """[.., n, out] -> [.., out / 64, n, 64]"""
    return x.unflatten(-1, (-1, BLOCK)).transpose(-3, -2)


Coded = tuple[Tensor, Tensor, int]


def _int4(weights: tuple[Weight, ...]) -> Coded | None:
    parts = [weight for weight in weights if isinstance(weight, Int4)]
    if len(parts) < len(weights) or len({part.group for part in parts}) > 1:
        return None
    codes = torch.cat([unpack_nibbles(part.qweight) for part in parts], dim=-1) ^ ZERO_POINT
    return codes, torch.cat([part.scales for part in parts], dim=-1), parts[0].group


def _scaled(weights: tuple[Weight, ...]) -> Coded | None:
    """bf16 numbers and a scale: plain weights, FP8 in whole blocks, INT8 with a scale per row."""
    if len(weights) == 1 and isinstance(weight := weights[0], Int8Row):
        return weight.weight.bfloat16().transpose(-1, -2), weight.weight_scale.reshape(1, -1), weight.weight.shape[-1]
    if all(isinstance(weight, Fp8Block) and not weight.weight.shape[-1] % FP8_BLOCK for weight in weights):
        codes = torch.cat([weight.weight.bfloat16() for weight in weights], dim=-2)  # type: ignore[union-attr]
        scales = [
            weight.weight_scale_inv.float().repeat_interleave(FP8_BLOCK, -2)[..., : weight.weight.shape[-2], :]  # type: ignore[union-attr]
            for weight in weights
        ]
        return codes.transpose(-1, -2), torch.cat(scales, dim=-2).transpose(-1, -2), FP8_BLOCK
    dense = torch.cat([as_tensor(weight).float() for weight in weights], dim=-2)
    codes = dense.bfloat16()
    if not torch.equal(codes.float(), dense):
        return None
    ones = torch.ones(*dense.shape[:-2], 1, dense.shape[-2])
    return codes.transpose(-1, -2), ones, dense.shape[-1]


def _multiplier(kind: int, tokens: int, dots: bool):
    """Adds `strips` times sixteen inputs of so many rows, multiplied with what lies at `weights` and scaled, to the 64
    sums of each row. Rows are bf16 with `dots`, else fp32."""

    def generate(context, builder, signature, addresses):
        rows, row_bytes, weights, strips, scales, sums = addresses
        vector, words = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(WORD, LANES)
        pairs, shorts = ir.VectorType(_Bfloat(), 2 * LANES), ir.VectorType(ir.IntType(16), 2 * LANES)

        def function(name, result, *arguments):
            return get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)

        fused = function(f"llvm.fma.v{LANES}f32", vector, vector, vector, vector)
        if dots:
            paired = function("llvm.x86.avx512bf16.dpbf16ps.512", vector, vector, pairs, pairs)
            look_up = function("llvm.x86.avx512.permvar.hi.512", shorts, shorts, shorts)
            numbers = [*range(8), *range(-8, 0)] * 2
            bits = torch.tensor(numbers, dtype=torch.bfloat16).view(torch.int16).tolist()
            table = ir.Constant(shorts, [code & 0xFFFF for code in bits])

        def load(address, offset, kind):
            moved = builder.add(address, ir.Constant(address.type, offset))
            return builder.load(builder.inttoptr(moved, kind.as_pointer()), align=1)

        def constant(value):
            return ir.Constant(words, [value] * LANES)

        def spread(value, kind):
            one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(WORD, 0))
            return builder.shuffle_vector(one, one, constant(0))

        def decode_pairs(start, pair, lane):
            """16 outputs of two inputs, as pairs of bf16."""
            if kind == BF16:
                return load(start, 4 * (pair * BLOCK + lane), pairs)
            both = builder.zext(load(start, pair * BLOCK + lane, ir.VectorType(ir.IntType(8), LANES)), words)
            apart = builder.and_(builder.or_(both, builder.shl(both, constant(12))), constant(0x000F000F))
            return builder.bitcast(builder.call(look_up, (table, builder.bitcast(apart, shorts))), pairs)

        def decode(start, pair, lane):
            """The same, as two vectors of fp32."""
            if kind == BF16:
                both = load(start, 4 * (pair * BLOCK + lane), words)
                halves = builder.shl(both, constant(16)), builder.and_(both, constant(0xFFFF0000))
                return [builder.bitcast(half, vector) for half in halves]
            both = builder.sext(load(start, pair * BLOCK + lane, ir.VectorType(ir.IntType(8), LANES)), words)
            low = builder.ashr(builder.shl(both, constant(28)), constant(28))
            return [builder.sitofp(half, vector) for half in (low, builder.ashr(both, constant(4)))]

        starts = [rows]
        for _ in range(1, tokens):
            starts.append(builder.add(starts[-1], row_bytes))
        number, zeros = strips.type, ir.Constant(vector, [0.0] * LANES)
        # bf16 is four times as long and often comes from memory: in one go, though registers do not hold all sums
        for lanes, unrolled in groups(tokens if kind == INT4 else 1, STRIP // 2):
            found = [[alloca_once_value(builder, zeros) for _ in lanes] for _ in range(tokens)]
            with for_range(builder, builder.mul(strips, ir.Constant(number, STRIP // 2 // unrolled))) as loop:
                here = builder.add(weights, builder.mul(loop.index, ir.Constant(number, unrolled * BLOCK * kind)))
                along = builder.mul(loop.index, ir.Constant(number, 2 * unrolled * (2 if dots else 4)))
                for pair in range(unrolled):
                    for which, lane in enumerate(lanes):
                        weight = decode_pairs(here, pair, lane) if dots else decode(here, pair, lane)
                        for start, totals in zip(starts, found, strict=True):
                            value, place = builder.load(totals[which]), builder.add(start, along)
                            if dots:
                                x = builder.bitcast(spread(load(place, 4 * pair, WORD), words), pairs)
                                value = builder.call(paired, (value, x, weight))
                            else:
                                for i, half in enumerate(weight):
                                    x = spread(load(place, 4 * (2 * pair + i), ir.FloatType()), vector)
                                    value = builder.call(fused, (x, half, value))
                            builder.store(value, totals[which])
            for which, lane in enumerate(lanes):
                scale = load(scales, 4 * lane, vector)
                for token, totals in enumerate(found):
                    place = builder.add(sums, ir.Constant(sums.type, 4 * (token * BLOCK + lane)))
                    pointer = builder.inttoptr(place, vector.as_pointer())
                    total = builder.call(fused, (builder.load(totals[which]), scale, builder.load(pointer, align=4)))
                    builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), generate


def make_multiply(kind: int, dots: bool = DOTS):
    """A compiled function for a kind of weights."""

    def of(tokens):
        @intrinsic
        def multiply(typing_context, rows, row_bytes, weights, strips, scales, sums):
            return _multiplier(kind, tokens, dots)

        return multiply

    one, two, three, four, five, six = (of(tokens) for tokens in range(1, MOST + 1))
    number = 2 if dots else 4

    @compiled
    def multiply(rows, row_bytes, count, inputs, group, weights, scales, sums):
        """sums [count, 64] += `count` rows times one block; rows, weights, scales and sums are addresses."""
        for first in range(0, inputs, group):
            row, place, left = rows + number * first, sums, count
            codes, scale = weights + first // 2 * BLOCK * kind, scales + 4 * (first // group) * BLOCK
            strips = group // STRIP
            while left >= MOST:
                six(row, row_bytes, codes, strips, scale, place)
                row, place, left = row + MOST * row_bytes, place + 4 * MOST * BLOCK, left - MOST
            if left == 1:
                one(row, row_bytes, codes, strips, scale, place)
            elif left == 2:
                two(row, row_bytes, codes, strips, scale, place)
            elif left == 3:
                three(row, row_bytes, codes, strips, scale, place)
            elif left == 4:
                four(row, row_bytes, codes, strips, scale, place)
            elif left == 5:
                five(row, row_bytes, codes, strips, scale, place)

    return multiply


multiply_int4, multiply_bf16 = make_multiply(INT4), make_multiply(BF16)


@compiled
def multiply(kind, rows, row_bytes, count, inputs, group, weights, scales, sums):
    if kind == INT4:
        multiply_int4(rows, row_bytes, count, inputs, group, weights, scales, sums)
    else:
        multiply_bf16(rows, row_bytes, count, inputs, group, weights, scales, sums)


@compiled
def copy_row(source, size, place):
    """A row of bf16 numbers to where `multiply` takes it from; both are addresses."""
    row = bf16s(source, (size,))
    if DOTS:
        bf16s(place, (size,))[:] = row
    else:
        wide = floats(place, (size,))
        for i in range(size):
            wide[i] = widen(row[i])


@compiled
def round_row(row, place):
    """The same with a row of fp32 numbers, which are rounded."""
    if DOTS:
        halves = bf16s(place, row.shape)
        for i in range(row.shape[0]):
            halves[i] = narrow(row[i])
    else:
        wide = floats(place, row.shape)
        for i in range(row.shape[0]):
            wide[i] = widen(narrow(row[i]))
