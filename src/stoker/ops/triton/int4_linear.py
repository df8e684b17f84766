# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
"""INT4 matrix product for 1..128 rows at memory speed: kernel, launch shapes and checks.

One warp multiplies 16 weight rows by one slice of the inputs. Both operands go from memory straight into the
registers of a matrix instruction: no shared memory, no barrier before the slices are summed. Every token count and
launch shape runs the same instructions in the same order over a row's inputs, so a row's bits depend on nothing but
that row.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.ops.dispatch import register
from stoker.ops.int4_linear import GROUP, MAX_TOKENS, UNIT, PackedInt4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UNROLL = 8  # groups of a slice in straight-line code; longer slices loop

# Two nibbles become two bf16 at once: 0x4300 | n is 128 + n, and 136 is subtracted exactly.
UNPACK_PTX = tl.constexpr("""{
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


@triton.jit
def _nibble(words, j: tl.constexpr, DOT: tl.constexpr):
    return (((words >> (4 * j)) & 0xF) - 8).to(tl.float32).to(DOT)


@triton.jit
def _unpack(words, PTX: tl.constexpr, DOT: tl.constexpr):
    """int16 words -> four tensors of their shape: inputs 0..31, 32..63, 64..95 and 96..127 of the group."""
    if PTX:
        return tl.inline_asm_elementwise(
            UNPACK_PTX, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return _nibble(words, 0, DOT), _nibble(words, 1, DOT), _nibble(words, 2, DOT), _nibble(words, 3, DOT)


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
def _token_operand(x_ptrs, ok, SLICES: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr):
    """[COLUMNS * SLICES, 32] -> [SLICES, 32, COLUMNS]"""
    x = tl.load(x_ptrs, mask=ok, other=0.0).to(DOT)
    x = tl.reshape(x, (COLUMNS // 8, SLICES, 8, 4, 4, 2))  # block of tokens, slice, token, c, (step, high), low
    return tl.reshape(tl.permute(x, (1, 4, 3, 5, 0, 2)), (SLICES, 32, COLUMNS))


@triton.jit
def _load_words(packed_ptr, group, SLICES: tl.constexpr, GROUPS: tl.constexpr):
    """[2 * SLICES, 256] int16: rows 0..7, then 8..15, of one block of every slice; 16 bytes a lane."""
    r = tl.arange(0, 2 * SLICES)[:, None]
    at = r % SLICES * (GROUPS * 512) + r // SLICES * 256 + tl.arange(0, 256)[None, :]
    # Weights are read once; evicting them first leaves the first-level cache to the tokens.
    return tl.load(packed_ptr + group * 512 + at, eviction_policy="evict_first")


@triton.jit
def token_rows(SLICES: tl.constexpr, COLUMNS: tl.constexpr):
    """Column and slice of each row [COLUMNS * SLICES, 1] of the token operand in memory."""
    r = tl.arange(0, COLUMNS * SLICES)[:, None]
    return r // (8 * SLICES) * 8 + r % 8, r // 8 % SLICES


@triton.jit
def _add_groups(
    sums, packed_ptr, s_ptrs, unit_words, unit_rows, x_ptrs, ok, first, COUNT: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, SLICES: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """`sums` plus COUNT groups of every slice, in order; weights are asked for AHEAD groups before their use."""
    words = ()
    for g in tl.static_range(min(AHEAD, COUNT)):
        for u in tl.static_range(UNITS):
            words += (_load_words(packed_ptr + u * unit_words, first + g, SLICES, GROUPS),)
    for g in tl.static_range(COUNT):
        at = x_ptrs + (first + g) * 128
        x0 = _token_operand(at, ok, SLICES, COLUMNS, DOT)
        x1 = _token_operand(at + 32, ok, SLICES, COLUMNS, DOT)
        x2 = _token_operand(at + 64, ok, SLICES, COLUMNS, DOT)
        x3 = _token_operand(at + 96, ok, SLICES, COLUMNS, DOT)
        added = ()
        for u in tl.static_range(UNITS):
            w0, w1, w2, w3 = _unpack(words[g * UNITS + u], PTX, DOT)
            d = tl.dot(_weight_operand(w0, SLICES), x0)
            d = tl.dot(_weight_operand(w1, SLICES), x1, d)
            d = tl.dot(_weight_operand(w2, SLICES), x2, d)
            d = tl.dot(_weight_operand(w3, SLICES), x3, d)  # [SLICES, 16, COLUMNS]
            scale = tl.load(s_ptrs + u * unit_rows + (first + g) * ROWS).to(tl.float32)[:, :, None]
            added += (tl.fma(d, tl.broadcast_to(scale, d.shape), sums[u]),)
            if g + AHEAD < COUNT:
                words += (_load_words(packed_ptr + u * unit_words, first + g + AHEAD, SLICES, GROUPS),)
        sums = added
    return sums


@triton.jit
def unit_products(
    packed_ptr, scales_ptr, unit_words, unit_rows, x_ptrs, ok, ROWS: tl.constexpr, UNITS: tl.constexpr,
    SLICES: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr,
    PTX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tuple of UNITS tensors [16, COLUMNS] fp32: rows of weights times tokens, over SLICES * GROUPS groups.

    `x_ptrs` [COLUMNS * SLICES, 32], rows as `token_rows` counts them, points at the first 32 inputs of each slice;
    `ok` says which of them exist. Units lie `unit_words` and `unit_rows` apart in weights and scales.
    """
    s_ptrs = scales_ptr + tl.arange(0, SLICES)[:, None] * (GROUPS * ROWS) + tl.arange(0, 16)[None, :]
    sums = ()
    for _ in tl.static_range(UNITS):
        sums += (tl.zeros((SLICES, 16, COLUMNS), tl.float32),)
    if CHUNK == GROUPS:
        sums = _add_groups(sums, packed_ptr, s_ptrs, unit_words, unit_rows, x_ptrs, ok, 0, GROUPS, ROWS, UNITS,
                           SLICES, GROUPS, COLUMNS, AHEAD, PTX, DOT)  # fmt: skip
    else:
        for first in tl.range(0, GROUPS, CHUNK, num_stages=1):
            sums = _add_groups(sums, packed_ptr, s_ptrs, unit_words, unit_rows, x_ptrs, ok, first, CHUNK, ROWS,
                               UNITS, SLICES, GROUPS, COLUMNS, AHEAD, PTX, DOT)  # fmt: skip
    products = ()
    for u in tl.static_range(UNITS):
        products += (tl.sum(sums[u], 0),)
    return products


@triton.jit(do_not_specialize=["tokens"])
def int4_linear_kernel(
    x_ptr, packed_ptr, scales_ptr, y_ptr, partial_ptr, counters_ptr, tokens, OUT: tl.constexpr,
    ROWS: tl.constexpr, IN: tl.constexpr, UNITS: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (b, t, s): the b-th UNITS units of rows, the t-th COLUMNS tokens, the s-th part of the inputs."""
    ALL_GROUPS: tl.constexpr = IN // 128
    GROUPS: tl.constexpr = ALL_GROUPS // (SLICES * SPLIT)
    SLICE: tl.constexpr = GROUPS * 128
    block = tl.program_id(0)
    part = tl.program_id(2)
    first = tl.program_id(1) * COLUMNS
    packed_ptr += block.to(tl.int64) * (UNITS * ALL_GROUPS * 512) + part * (SLICES * GROUPS * 512)
    scales_ptr += block * (UNITS * 16) + part * (SLICES * GROUPS) * ROWS
    token, slice = token_rows(SLICES, COLUMNS)
    token += first
    x_ptrs = x_ptr + token * IN + (part * SLICES + slice) * SLICE + tl.arange(0, 32)[None, :]
    products = unit_products(packed_ptr, scales_ptr, ALL_GROUPS * 512, 16, x_ptrs, token < tokens, ROWS, UNITS,
                             SLICES, GROUPS, COLUMNS, AHEAD, CHUNK, PTX, DOT)  # fmt: skip
    column = first + tl.arange(0, COLUMNS)[None, :]
    row = block * (UNITS * 16) + tl.arange(0, 16)[:, None]
    for u in tl.static_range(UNITS):
        r = row + 16 * u
        if SPLIT == 1:
            ok = (column < tokens) & (r < OUT)
            tl.store(y_ptr + column * OUT + r, products[u].to(y_ptr.dtype.element_ty), mask=ok)
        else:
            tl.store(partial_ptr + (part * tokens + column) * ROWS + r, products[u], mask=column < tokens)
    if SPLIT > 1:
        # The program that comes last adds the parts, always from the first to the last.
        tl.debug_barrier()
        counter = counters_ptr + tl.program_id(1) * (ROWS // 16) + block
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            tl.debug_barrier()
            for u in tl.static_range(UNITS):
                r = row + 16 * u
                total = tl.zeros((16, COLUMNS), tl.float32)
                for p in tl.static_range(SPLIT):
                    at = partial_ptr + (p * tokens + column) * ROWS + r
                    total += tl.load(at, mask=column < tokens, other=0.0, cache_modifier=".cg")
                ok = (column < tokens) & (r < OUT)
                tl.store(y_ptr + column * OUT + r, total.to(y_ptr.dtype.element_ty), mask=ok)
            tl.store(counter, 0)


def int4_linear(x: Tensor, weight: PackedInt4) -> Tensor:
    """[T, in] bf16 x [out, in] -> [T, out] bf16, T <= 128."""
    check_tokens(x, weight.in_features)
    check_weight("weight", weight, x, dimensions=4)
    tokens = x.shape[0]
    shape = launch_shape(tokens, weight.rows, weight.in_features)
    split = shape["SPLIT"]
    y = x.new_empty(tokens, weight.out_features)
    partial = x.new_empty((split, tokens, weight.rows) if split > 1 else (0,), dtype=torch.float32)
    grid = (weight.rows // (UNIT * shape["UNITS"]), triton.cdiv(tokens, shape["COLUMNS"]), split)
    int4_linear_kernel[grid](
        x, weight.packed, weight.scales, y, partial, weight.counters, tokens, OUT=weight.out_features,
        ROWS=weight.rows, IN=weight.in_features, **shape, **arithmetic(x.device),
    )  # fmt: skip
    return y


def launch_shape(tokens: int, rows: int, in_features: int) -> dict[str, Any]:
    """How the work is cut. Slices and split decide the order of the sum, so they follow the weight's shape alone.

    The rest was measured on an H200 (benchmarks/gpu_kernels.py) and changes no bit of the result.
    """
    groups = in_features // GROUP
    slices = slice_count(groups)
    # Too few rows to fill a GPU: two programs share a row's inputs.
    split = 2 if rows <= 8192 and groups >= 32 and groups % (2 * slices) == 0 else 1
    if split > 1:
        cut = {"UNITS": 1, "AHEAD": 4, **register_limit(128)}
    elif tokens <= 8:
        cut = {"UNITS": 1, "AHEAD": 1}
    else:
        cut = {"UNITS": 2, "AHEAD": 2, **register_limit(96)}
    columns = 8 if tokens <= 8 else 16
    chunk = chunk_size(groups // (slices * split))
    return {"SLICES": slices, "SPLIT": split, "COLUMNS": columns, "CHUNK": chunk, "num_warps": slices, **cut}


def slice_count(groups: int) -> int:
    """Warps that share a row's inputs."""
    return next(s for s in (4, 2, 1) if groups % s == 0)


def chunk_size(groups: int) -> int:
    return next(c for c in range(min(UNROLL, groups), 0, -1) if groups % c == 0)


def register_limit(count: int) -> dict[str, int]:
    """Lets NVIDIA's assembler spend registers on loads in flight; it saves them otherwise."""
    return {} if torch.version.hip else {"maxnreg": count}


def arithmetic(device: torch.device) -> dict[str, Any]:
    """PTX conversion where bf16x2 arithmetic exists; the interpreter has no bf16 arithmetic and multiplies in fp32.

    Fused multiply-adds are written out, so the compiler is told to form none of its own.
    """
    if INTERPRETED:
        return {"PTX": False, "DOT": tl.float32}
    ptx = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PTX": ptx, "DOT": tl.bfloat16, "enable_fp_fusion": False}


def check_tokens(x: Tensor, in_features: int) -> None:
    if x.dim() != 2 or x.shape[1] != in_features:
        raise ValueError(f"x must be [tokens, {in_features}], found {list(x.shape)}.")
    if not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must have 1 to {MAX_TOKENS} rows, found {x.shape[0]}; more belong to prefill.")
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x must be torch.bfloat16, found {x.dtype}.")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, found strides {x.stride()} for {list(x.shape)}.")
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(f"x must be on a GPU, found {x.device}; the reference runs elsewhere.")


def check_weight(name: str, weight: PackedInt4, x: Tensor, dimensions: int) -> None:
    if weight.packed.dim() != dimensions:
        raise ValueError(f"{name}.packed must have {dimensions} dimensions, found {list(weight.packed.shape)}.")
    for field, tensor, dtype in (
        ("packed", weight.packed, torch.int16),
        ("scales", weight.scales, torch.float16),
        ("counters", weight.counters, torch.int32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"{name}.{field} must be {dtype}, found {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"{name}.{field} must be on {x.device} like x, found {tensor.device}.")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.{field} must be contiguous, found strides {tensor.stride()}.")


register("int4_linear", int4_linear)
