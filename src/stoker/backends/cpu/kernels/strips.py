# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Rows in fp32 times a block of 64 outputs, sixteen inputs at a time, spelled out in the compiler's own language: its
vectors are wider and stay in registers longer than those it finds by itself.

A sum goes over its inputs from the first to the last, rounded once for each, however many rows are computed together.
"""

from llvmlite import binding, ir
from numba import types
from numba.core.cgutils import alloca_once_value, for_range, get_or_insert_function
from numba.extending import intrinsic

from stoker.backends.cpu.kernels.compiled import compiled

BLOCK = 64  # outputs
STRIP = 16  # inputs
LANES = 16
WORD = ir.IntType(32)
WIDE = bool(binding.get_host_cpu_features().get("avx512f"))  # 32 registers of sixteen numbers, else the room of eight


def groups(tokens: int, most: int) -> list[tuple[range, int]]:
    """How the 64 sums of so many rows are computed, as many at a time as registers hold: the first of each sixteen, and
    how many of `most` inputs are spelled out one after another before a loop goes on."""
    width = BLOCK if WIDE else max(LANES, BLOCK // tokens // LANES * LANES)
    unrolled = most if WIDE or tokens == 1 else 1
    return [(range(first, first + width, LANES), unrolled) for first in range(0, BLOCK, width)]


def _multiplier(tokens):
    """Adds sixteen inputs of so many rows, times sixteen rows of 64 weights, to 64 sums of each row: all in
    registers."""

    def generate(context, builder, signature, addresses):
        rows, row_bytes, weights, sums = addresses
        single, vector, words = ir.FloatType(), ir.VectorType(ir.FloatType(), LANES), ir.VectorType(WORD, LANES)
        fused = get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")

        def load(address, offset, kind):
            moved = builder.add(address, ir.Constant(address.type, offset))
            return builder.load(builder.inttoptr(moved, kind.as_pointer()), align=1)

        def spread(value):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(WORD, 0))
            return builder.shuffle_vector(one, one, ir.Constant(words, [0] * LANES))

        def add(starts, weights, inputs, lanes, found):
            for place in range(inputs):
                for which, lane in enumerate(lanes):
                    weight = load(weights, 4 * (place * BLOCK + lane), vector)
                    for start, totals in zip(starts, found, strict=True):
                        x = spread(load(start, 4 * place, single))
                        builder.store(builder.call(fused, (x, weight, builder.load(totals[which]))), totals[which])

        starts, number = [rows], rows.type
        for _ in range(1, tokens):
            starts.append(builder.add(starts[-1], row_bytes))
        for lanes, unrolled in groups(tokens, STRIP):
            places = [[4 * (token * BLOCK + lane) for lane in lanes] for token in range(tokens)]
            found = [[alloca_once_value(builder, load(sums, place, vector)) for place in row] for row in places]
            if unrolled == STRIP:
                add(starts, weights, STRIP, lanes, found)
            else:
                with for_range(builder, ir.Constant(number, STRIP // unrolled)) as loop:
                    along = builder.mul(loop.index, ir.Constant(number, 4 * unrolled))
                    here = builder.add(weights, builder.mul(along, ir.Constant(number, BLOCK)))
                    add([builder.add(start, along) for start in starts], here, unrolled, lanes, found)
            for totals, row in zip(found, places, strict=True):
                for total, place in zip(totals, row, strict=True):
                    moved = builder.add(sums, ir.Constant(number, place))
                    builder.store(builder.load(total), builder.inttoptr(moved, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _of(tokens):
    @intrinsic
    def multiply(typing_context, rows, row_bytes, weights, sums):
        return _multiplier(tokens)

    return multiply


_one, _two, _three, _four, _five, _six = (_of(tokens) for tokens in range(1, 7))


@compiled
def add_strip(x, first, weights, sums):
    """sums [rows, 64] += x[:, first : first + 16] times what lies at the address `weights`, as many rows at a time as
    registers hold."""
    rows, row_bytes, place, left = x.ctypes.data + 4 * first, 4 * x.shape[1], sums.ctypes.data, x.shape[0]
    while left >= 6:
        _six(rows, row_bytes, weights, place)
        rows, place, left = rows + 6 * row_bytes, place + 24 * BLOCK, left - 6
    if left == 1:
        _one(rows, row_bytes, weights, place)
    elif left == 2:
        _two(rows, row_bytes, weights, place)
    elif left == 3:
        _three(rows, row_bytes, weights, place)
    elif left == 4:
        _four(rows, row_bytes, weights, place)
    elif left == 5:
        _five(rows, row_bytes, weights, place)


@intrinsic
def widen_many(typing_context, source, size, out):
    """bf16 -> fp32, `size` numbers, a multiple of 16."""

    def generate(context, builder, signature, addresses):
        source, size, out = addresses
        number, halves, words = size.type, ir.VectorType(ir.IntType(16), LANES), ir.VectorType(WORD, LANES)
        shift = ir.Constant(words, [16] * LANES)
        with for_range(builder, builder.udiv(size, ir.Constant(number, LANES))) as loop:
            start = builder.mul(loop.index, ir.Constant(number, 2 * LANES))
            bits = builder.load(builder.inttoptr(builder.add(source, start), halves.as_pointer()), align=2)
            place = builder.add(out, builder.mul(start, ir.Constant(number, 2)))
            wide = builder.shl(builder.zext(bits, words), shift)
            builder.store(wide, builder.inttoptr(place, words.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def sixteen_dots(typing_context, row, others, size, out):
    """Products of a row with sixteen rows that lie behind each other, all of `size` (a multiple of 16) fp32 numbers."""

    def generate(context, builder, signature, addresses):
        row, others, size, out = addresses
        vector, number = ir.VectorType(ir.FloatType(), LANES), size.type
        fused = get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32")

        def load(address):
            return builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)

        row_bytes, most = builder.mul(size, ir.Constant(number, 4)), LANES if WIDE else 4
        found, distance = [], 1
        for first in range(0, LANES, most):
            sums = [alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES)) for _ in range(most)]
            begin = builder.add(others, builder.mul(row_bytes, ir.Constant(number, first)))
            with for_range(builder, builder.udiv(size, ir.Constant(number, LANES))) as loop:
                offset = builder.mul(loop.index, ir.Constant(number, 4 * LANES))
                x, place = load(builder.add(row, offset)), builder.add(begin, offset)
                for total in sums:
                    builder.store(builder.call(fused, (x, load(place), builder.load(total))), total)
                    place = builder.add(place, row_bytes)
            found += [builder.load(total) for total in sums]
        while len(found) > 1:  # lane l of the last one left is the sum of all lanes of number l
            found = [_paired(builder, a, b, distance) for a, b in zip(found[::2], found[1::2], strict=True)]
            distance *= 2
        builder.store(found[0], builder.inttoptr(out, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), generate


def _paired(builder, a, b, distance):
    """Lanes without the bit `distance`: those of a with their neighbours so far away added; with it: those of b."""
    near = [lane if not lane & distance else LANES + (lane ^ distance) for lane in range(LANES)]
    far = [lane ^ distance if not lane & distance else LANES + lane for lane in range(LANES)]
    words = ir.VectorType(WORD, LANES)
    return builder.fadd(*(builder.shuffle_vector(a, b, ir.Constant(words, order)) for order in (near, far)))
