# Triton types the kernels; Python's annotations cannot. Its branches on constants must keep their else.
# ruff: noqa: RET505, SIM109
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment, misc"
"""Rows of a packed weight times tokens: what `linear`, `route` and `experts` are made of.

One warp multiplies 16 weight rows by one slice of the inputs. Both operands go from memory straight into the registers
of a matrix instruction: no shared memory, no barrier before the slices are summed. Every token count and launch shape
runs the same instructions in the same order over a row's inputs, so a row's bits depend on nothing but that row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# stoker.backends.gpu.packed.Kind
INT4 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP8 = tl.constexpr(2)
INT8 = tl.constexpr(3)
NVFP4 = tl.constexpr(4)

# Where tokens are read from. What the launch before the last wrote is taken from the second level of the cache by those
# that do not wait: nothing promises them that the first forgot what was there before.
CACHED = tl.constexpr("")
SECOND_LEVEL = tl.constexpr(".cg")

# Two nibbles become two bf16 at once: 0x4300 | n is 128 + n, and 136 is subtracted exactly.
INT4_PTX = tl.constexpr("""{
.reg .b32 nibble, one, bias, a, t;
mov.b32 nibble, 0x000f000f;
mov.b32 one, 0x43004300;
mov.b32 bias, 0x43084308;
lop3.b32 a, $4, nibble, one, 0xea;
sub.bf16x2 $0, a, bias;
shr.u32 t, $4, 4;
lop3.b32 a, t, nibble, one, 0xea;
sub.bf16x2 $1, a, bias;
shr.u32 t, $4, 8;
lop3.b32 a, t, nibble, one, 0xea;
sub.bf16x2 $2, a, bias;
shr.u32 t, $4, 12;
lop3.b32 a, t, nibble, one, 0xea;
sub.bf16x2 $3, a, bias;
}""")

# E2M1's two exponent bits and one mantissa bit, put where bf16 has them, are the value times 2^-126; so subnormals
# come out right too.
NVFP4_PTX = tl.constexpr("""{
.reg .b32 value, sign, factor, a, b, t;
mov.b32 value, 0x01c001c0;
mov.b32 sign, 0x80008000;
mov.b32 factor, 0x7e807e80;
shl.b32 t, $4, 6;
and.b32 a, t, value;
shl.b32 t, $4, 12;
lop3.b32 b, t, sign, a, 0xea;
mul.bf16x2 $0, b, factor;
shl.b32 t, $4, 2;
and.b32 a, t, value;
shl.b32 t, $4, 8;
lop3.b32 b, t, sign, a, 0xea;
mul.bf16x2 $1, b, factor;
shr.u32 t, $4, 2;
and.b32 a, t, value;
shl.b32 t, $4, 4;
lop3.b32 b, t, sign, a, 0xea;
mul.bf16x2 $2, b, factor;
shr.u32 t, $4, 6;
and.b32 a, t, value;
lop3.b32 b, $4, sign, a, 0xea;
mul.bf16x2 $3, b, factor;
}""")

# The same for E4M3, whose bits in bf16's places are the value times 2^-120.
FP8_PTX = tl.constexpr("""{
.reg .b32 value, sign, factor, a, b, t;
mov.b32 value, 0x07f007f0;
mov.b32 sign, 0x80008000;
mov.b32 factor, 0x7b807b80;
shl.b32 t, $2, 4;
and.b32 a, t, value;
shl.b32 t, $2, 8;
lop3.b32 b, t, sign, a, 0xea;
mul.bf16x2 $0, b, factor;
shr.u32 t, $2, 4;
and.b32 a, t, value;
lop3.b32 b, $2, sign, a, 0xea;
mul.bf16x2 $1, b, factor;
}""")

# Seven bits make 128 + n; minus 128 if the byte is positive, minus 256 if it is negative.
INT8_PTX = tl.constexpr("""{
.reg .b32 low, top, one, a, b, t;
mov.b32 low, 0x007f007f;
mov.b32 top, 0x00800080;
mov.b32 one, 0x43004300;
lop3.b32 a, $2, low, one, 0xea;
lop3.b32 b, $2, top, one, 0xea;
sub.bf16x2 $0, a, b;
shr.u32 t, $2, 8;
lop3.b32 a, t, low, one, 0xea;
lop3.b32 b, t, top, one, 0xea;
sub.bf16x2 $1, a, b;
}""")


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """With programmatic dependent launch a kernel starts while the one before it ends; before this it reads nothing but
    what no kernel of the step writes, or what the one before the last wrote: the next kernel is let in only here."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def row_sums(x, WIDTH: tl.constexpr):
    """Sums of rows [n, WIDTH], neighbours first, then pairs of pairs: [n, 1]. A plain sum follows the layout of the
    tile, which the compiler chooses for each kernel; of two there is but one sum."""
    LEVELS: tl.constexpr = WIDTH.bit_length() - 1
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0], WIDTH >> (level + 1), 2)), 2)
    return x


@triton.jit
def _nibble(words, j: tl.constexpr, DOT: tl.constexpr):
    return (((words >> (4 * j)) & 0xF) - 8).to(tl.float32).to(DOT)


@triton.jit
def _e2m1(words, j: tl.constexpr, DOT: tl.constexpr):
    code = (words >> (4 * j)).to(tl.int32) & 0xF
    half = code & 7
    doubled = tl.where(half < 4, half, (2 + (half & 1)) << (half >> 1) - 1)  # 0 1 2 3 4 6 8 12
    return (tl.where(code > 7, -doubled, doubled).to(tl.float32) * 0.5).to(DOT)


@triton.jit
def e4m3(byte, DOT: tl.constexpr):
    """int32 bytes -> their value; subnormals apart, so that no arithmetic on fp32 subnormals is needed."""
    size = byte & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return tl.where(byte > 127, -value, value).to(DOT)


@triton.jit
def _byte(words, j: tl.constexpr):
    return (words.to(tl.int32) >> (8 * j)) & 0xFF


@triton.jit
def _int8(words, j: tl.constexpr, DOT: tl.constexpr):
    byte = _byte(words, j)
    return tl.where(byte > 127, byte - 256, byte).to(tl.float32).to(DOT)


@triton.jit
def _unpack(words, KIND: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr):
    """One tile -> as many quarters as it holds, each of its shape."""
    if KIND == BF16:
        return (words.to(DOT),)
    elif PTX:
        if KIND == INT4:
            return tl.inline_asm_elementwise(
                INT4_PTX, "=r,=r,=r,=r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        elif KIND == NVFP4:
            return tl.inline_asm_elementwise(
                NVFP4_PTX, "=r,=r,=r,=r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        elif KIND == FP8:
            return tl.inline_asm_elementwise(
                FP8_PTX, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                INT8_PTX, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
    elif KIND == INT4:
        return _nibble(words, 0, DOT), _nibble(words, 1, DOT), _nibble(words, 2, DOT), _nibble(words, 3, DOT)
    elif KIND == NVFP4:
        return _e2m1(words, 0, DOT), _e2m1(words, 1, DOT), _e2m1(words, 2, DOT), _e2m1(words, 3, DOT)
    elif KIND == FP8:
        return e4m3(_byte(words, 0), DOT), e4m3(_byte(words, 1), DOT)
    else:
        return _int8(words, 0, DOT), _int8(words, 1, DOT)


# A matrix instruction takes 16 inputs, four per lane: 2c, 2c+1, 2c+8 and 2c+9 for lane c of four. Which inputs
# of the model those are is free as long as both operands agree, so lane c takes the 8 consecutive ones it can load
# at once: the 32 inputs of a quarter group, counted (c, step, high, low) in memory, are (step, high, c, low) to two
# instructions. Loads are two-dimensional and one warp's lanes cover one slice, so that every compiler version deals
# slices to warps and the loaded registers are the operand. A third dimension lets some versions deal differently
# and shuffle.


@triton.jit
def _weight_operand(w, SLICES: tl.constexpr):
    """[2 * SLICES, 256] -> [SLICES, 16, 32]"""
    w = tl.reshape(w, (2, SLICES, 8, 4, 4, 2))  # half, slice, row, c, (step, high), low
    return tl.reshape(tl.permute(w, (1, 0, 2, 4, 3, 5)), (SLICES, 16, 32))


@triton.jit
def _token_operand(x_ptrs, ok, SLICES: tl.constexpr, COLUMNS: tl.constexpr, CACHE: tl.constexpr, DOT: tl.constexpr):
    """[COLUMNS * SLICES, 32] -> [SLICES, 32, COLUMNS]"""
    x = tl.load(x_ptrs, mask=ok, other=0.0, cache_modifier=CACHE).to(DOT)
    x = tl.reshape(x, (COLUMNS // 8, SLICES, 8, 4, 4, 2))  # block of tokens, slice, token, c, (step, high), low
    return tl.reshape(tl.permute(x, (1, 4, 3, 5, 0, 2)), (SLICES, 32, COLUMNS))


@triton.jit
def token_rows(SLICES: tl.constexpr, COLUMNS: tl.constexpr):
    """Column and slice of each row [COLUMNS * SLICES, 1] of the token operand in memory."""
    r = tl.arange(0, COLUMNS * SLICES)[:, None]
    return r // (8 * SLICES) * 8 + r % 8, r // 8 % SLICES


@triton.jit
def _load_tile(packed_ptr, at, SLICES: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """[2 * SLICES, 256] words: rows 0..7, then 8..15, of one tile of every slice; 16 bytes a lane."""
    r = tl.arange(0, 2 * SLICES)[:, None]
    lanes = r % SLICES * (GROUPS * TILES * 512) + r // SLICES * 256 + tl.arange(0, 256)[None, :]
    # Weights are read once; evicting them first leaves the first-level cache to the tokens.
    return tl.load(packed_ptr + at * 512 + lanes, eviction_policy="evict_first")


@triton.jit
def _load_lane_scales(scales_ptr, group, SLICES: tl.constexpr, GROUPS: tl.constexpr):
    """[2 * SLICES, 32] int32: the four E4M3 scales of each lane's inputs."""
    r = tl.arange(0, 2 * SLICES)[:, None]
    at = r % SLICES * (GROUPS * 64) + r // SLICES * 32 + tl.arange(0, 32)[None, :]
    return tl.load(scales_ptr + group * 64 + at)


@triton.jit
def _lane_scale(lanes, j: tl.constexpr, SLICES: tl.constexpr, DOT: tl.constexpr):
    """[2 * SLICES, 256]: byte j of each lane, for its eight inputs."""
    scale = e4m3((lanes >> (8 * j)) & 0xFF, DOT)[:, :, None]
    return tl.reshape(tl.broadcast_to(scale, (2 * SLICES, 32, 8)), (2 * SLICES, 256))


@triton.jit
def _add_groups(
    sums, packed_ptr, scales_ptr, s_ptrs, unit_words, unit_scales, x_ptrs, ok, first, COUNT: tl.constexpr,
    SCALE_STEP: tl.constexpr, KIND: tl.constexpr, UNITS: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CACHE: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`sums` plus COUNT groups of every slice, in order; weights are asked for AHEAD groups before their use, and the
    first of them before the wait for what they are multiplied with."""
    TILES: tl.constexpr = 4 if KIND == BF16 else (2 if KIND == FP8 or KIND == INT8 else 1)
    words = ()
    for g in tl.static_range(min(AHEAD, COUNT)):
        for u in tl.static_range(UNITS):
            for tile in tl.static_range(TILES):
                words += (_load_tile(packed_ptr + u * unit_words, (first + g) * TILES + tile, SLICES, GROUPS, TILES),)
    wait_for_inputs(PDL)
    for g in tl.static_range(COUNT):
        at = x_ptrs + (first + g) * 128
        x0 = _token_operand(at, ok, SLICES, COLUMNS, CACHE, DOT)
        x1 = _token_operand(at + 32, ok, SLICES, COLUMNS, CACHE, DOT)
        x2 = _token_operand(at + 64, ok, SLICES, COLUMNS, CACHE, DOT)
        x3 = _token_operand(at + 96, ok, SLICES, COLUMNS, CACHE, DOT)
        added = ()
        for u in tl.static_range(UNITS):
            quarters = ()
            for tile in tl.static_range(TILES):
                quarters += _unpack(words[(g * UNITS + u) * TILES + tile], KIND, PTX, DOT)
            w0, w1, w2, w3 = quarters
            if KIND == NVFP4:
                lanes = _load_lane_scales(scales_ptr + u * unit_scales, first + g, SLICES, GROUPS)
                w0 = w0 * _lane_scale(lanes, 0, SLICES, DOT)
                w1 = w1 * _lane_scale(lanes, 1, SLICES, DOT)
                w2 = w2 * _lane_scale(lanes, 2, SLICES, DOT)
                w3 = w3 * _lane_scale(lanes, 3, SLICES, DOT)
            if KIND == INT4 or KIND == FP8:
                d = tl.dot(_weight_operand(w0, SLICES), x0)
            else:
                d = tl.dot(_weight_operand(w0, SLICES), x0, sums[u])
            d = tl.dot(_weight_operand(w1, SLICES), x1, d)
            d = tl.dot(_weight_operand(w2, SLICES), x2, d)
            d = tl.dot(_weight_operand(w3, SLICES), x3, d)  # [SLICES, 16, COLUMNS]
            if KIND == INT4 or KIND == FP8:
                scale = tl.load(s_ptrs + u * unit_scales + (first + g) * SCALE_STEP).to(tl.float32)[:, :, None]
                d = tl.fma(d, tl.broadcast_to(scale, d.shape), sums[u])
            added += (d,)
            if g + AHEAD < COUNT:
                for tile in tl.static_range(TILES):
                    ahead = (first + g + AHEAD) * TILES + tile
                    words += (_load_tile(packed_ptr + u * unit_words, ahead, SLICES, GROUPS, TILES),)
        sums = added
    return sums


@triton.jit
def unit_products(
    packed_ptr, scales_ptr, row_scales_ptr, unit, apart, part, x_ptrs, ok, KIND: tl.constexpr, ROWS: tl.constexpr,
    UNITS: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr, ALL_GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr, CACHE: tl.constexpr = CACHED,
):  # fmt: skip
    """A tuple of UNITS tensors [16, COLUMNS] fp32: units `unit`, `unit + apart`, .. of rows times tokens, over the
    `part`-th SLICES * GROUPS of all groups.

    `x_ptrs` [COLUMNS * SLICES, 32], rows as `token_rows` counts them, points at the first 32 inputs of each slice;
    `ok` says which of them exist. With PDL it waits for them (`wait_for_inputs`) when weights are on their way; CACHE
    is their cache modifier.
    """
    TILES: tl.constexpr = 4 if KIND == BF16 else (2 if KIND == FP8 or KIND == INT8 else 1)
    UNIT_WORDS: tl.constexpr = ALL_GROUPS * TILES * 512
    packed_ptr += unit.to(tl.int64) * UNIT_WORDS + part * (SLICES * GROUPS * TILES * 512)
    # what one group and one unit further on are to the scales
    SCALE_STEP: tl.constexpr = ROWS if KIND == INT4 else ROWS // 16
    UNIT_SCALES: tl.constexpr = 16 if KIND == INT4 else (1 if KIND == FP8 else ALL_GROUPS * 64)
    slice = tl.arange(0, SLICES)[:, None]
    s_ptrs = scales_ptr
    if KIND == INT4:
        rows = tl.arange(0, 16)[None, :]
        s_ptrs = scales_ptr + unit * 16 + (part * SLICES + slice) * (GROUPS * ROWS) + rows
    elif KIND == FP8:
        s_ptrs = scales_ptr + unit + (part * SLICES + slice) * (GROUPS * (ROWS // 16))
    elif KIND == NVFP4:
        scales_ptr += unit.to(tl.int64) * UNIT_SCALES + part * (SLICES * GROUPS * 64)
    sums = ()
    for _ in tl.static_range(UNITS):
        sums += (tl.zeros((SLICES, 16, COLUMNS), tl.float32),)
    if CHUNK == GROUPS:
        sums = _add_groups(sums, packed_ptr, scales_ptr, s_ptrs, apart * UNIT_WORDS, apart * UNIT_SCALES, x_ptrs, ok,
                           0, GROUPS, SCALE_STEP, KIND, UNITS, SLICES, GROUPS, COLUMNS, AHEAD, CACHE, PTX, DOT,
                           PDL)  # fmt: skip
    else:
        for first in tl.range(0, GROUPS, CHUNK, num_stages=1):
            sums = _add_groups(sums, packed_ptr, scales_ptr, s_ptrs, apart * UNIT_WORDS, apart * UNIT_SCALES, x_ptrs,
                               ok, first, CHUNK, SCALE_STEP, KIND, UNITS, SLICES, GROUPS, COLUMNS, AHEAD, CACHE,
                               PTX, DOT, PDL)  # fmt: skip
    products = ()
    for u in tl.static_range(UNITS):
        product = tl.sum(sums[u], 0)
        if KIND == INT8 or KIND == NVFP4:
            scale = tl.load(row_scales_ptr + (unit + u * apart) * 16 + tl.arange(0, 16))
            product = product * scale[:, None]
        products += (product,)
    return products
