# Triton types the kernels; Python's annotations cannot.
# ruff: noqa: SIM109
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Projections of a prompt, any number of rows, weights of any format.

A weight is first unpacked to bf16, once for all rows of a chunk, and then multiplied in large tiles. Every tile adds
the inputs up in the same order, so a row's bits depend on that row alone: not on the length of the chunk, not on its
place in it. Libraries choose that order by the number of rows; hence no library here.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.launch import (
    INTERPRETED,
    arithmetic,
    check,
    check_weight,
    multiprocessors,
    pick,
)
from stoker.backends.gpu.kernels.products import FP8, INT4, INT8, NVFP4, _unpack, e4m3
from stoker.backends.gpu.packed import Kind, PackedWeight

UNPACKED = 16  # blocks of 16 rows by 128 inputs that one program unpacks
SUPER = 8  # tiles of rows that share a stretch of the weight while it is in the cache


@triton.jit
def unpack_kernel(
    packed_ptr, scales_ptr, out_ptr, blocks, KIND: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    COUNT: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program b: COUNT blocks of a packed weight as bf16, in the same order. What scales a group is rounded in; what
    scales a whole row is left to the product."""
    TILES: tl.constexpr = 2 if KIND == FP8 or KIND == INT8 else 1
    QUARTERS: tl.constexpr = 4 // TILES
    block = (tl.program_id(0) * COUNT + tl.arange(0, COUNT))[:, None]
    there = block < blocks
    word = tl.arange(0, 512)[None, :]
    unit = block // GROUPS
    group = block % GROUPS
    at = block.to(tl.int64)
    for tile in tl.static_range(TILES):
        words = tl.load(packed_ptr + (at * TILES + tile) * 512 + word, mask=there, other=0)
        values = _unpack(words, KIND, PTX, DOT)
        for j in tl.static_range(QUARTERS):
            value = values[j].to(tl.float32)
            if KIND == INT4:
                row = unit * 16 + word // 32
                value = value * tl.load(scales_ptr + group * ROWS + row, mask=there, other=0.0).to(tl.float32)
            elif KIND == FP8:
                value = value * tl.load(scales_ptr + group * (ROWS // 16) + unit, mask=there, other=0.0)
            elif KIND == NVFP4:
                lane = tl.load(scales_ptr + at * 64 + word // 8, mask=there, other=0)
                value = value * e4m3((lane >> (8 * j)) & 0xFF, tl.float32)
            target = out_ptr + (at * 4 + tile * QUARTERS + j) * 512 + word
            tl.store(target, value.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def prefill_linear_kernel(
    x_ptr, packed_ptr, row_scales_ptr, y_ptr, tokens, OUT: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr,
    ROW_SCALES: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SUPER: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program p: M tokens by N rows of a bf16 weight; with ADD onto what y holds."""
    BLOCKS: tl.constexpr = (ROWS + N - 1) // N
    tiles = (tokens + M - 1) // M
    # SUPER tiles of tokens go through all rows together
    high = tl.program_id(0) // (SUPER * BLOCKS) * SUPER
    beside = tl.minimum(tiles - high, SUPER)
    inside = tl.program_id(0) % (SUPER * BLOCKS)
    token = ((high + inside % beside) * M + tl.arange(0, M)).to(tl.int64)
    row = inside // beside * N + tl.arange(0, N)
    there = token < tokens
    within = row < ROWS
    k = tl.arange(0, K)
    x_ptrs = x_ptr + tl.where(there, token, 0)[:, None] * IN + k[None, :]
    # input k of a row lies in quarter k // 32 of its block of 16 rows
    safe = tl.where(within, row, 0)
    w_row = (safe // 16).to(tl.int64) * (IN * 16) + safe % 16 * 32
    w_ptrs = packed_ptr + w_row[:, None] + (k // 32 * 512 + k % 32)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, IN, K):
        x = tl.load(x_ptrs + start)
        w = tl.load(w_ptrs + start * 16)
        total = tl.dot(x.to(DOT), tl.trans(w.to(DOT)), total)
    if ROW_SCALES:
        total = total * tl.load(row_scales_ptr + row, mask=within, other=0.0)[None, :]
    at = token[:, None] * OUT + row[None, :]
    ok = there[:, None] & (row < OUT)[None, :]
    if ADD:
        total += tl.load(y_ptr + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=ok)


def unpacked(weight: PackedWeight, scratch: Tensor) -> PackedWeight:
    """The weight in bf16, in `scratch` (bf16, large enough) unless it is that already.

    INT4 and FP8 are rounded to bf16 with their scales; INT8 and NVFP4 are exact and keep their `row_scales`.
    """
    if weight.kind is Kind.BF16:
        return weight
    check_weight("weight", weight, scratch)
    units, groups = weight.packed.shape[:2]
    count = weight.rows * weight.in_features
    if scratch.dtype != torch.bfloat16 or scratch.numel() < count:
        raise ValueError(f"scratch must hold {count} bf16, found {scratch.numel()} of {scratch.dtype}.")
    packed = scratch.view(-1)[:count].view(units, groups, 4, 16, 32)
    each = 64 if INTERPRETED else UNPACKED
    unpack_kernel[(triton.cdiv(units * groups, each),)](
        weight.packed, weight.scales, packed, units * groups, KIND=int(weight.kind), ROWS=weight.rows,
        GROUPS=groups, COUNT=each, num_warps=4, **arithmetic(scratch.device),
    )  # fmt: skip
    return replace(weight, kind=Kind.BF16, packed=packed, scales=packed)


def prefill_linear(x: Tensor, weight: PackedWeight, y: Tensor, add: bool = False, row_scales: bool = False) -> None:
    """x [T, in] bf16 times a bf16 weight [out, in] into y [T, out], bf16 or fp32; or onto y, if `add`. With
    `row_scales` those of the weight are multiplied in."""
    tokens = x.shape[0]
    check("x", x, (tokens, weight.in_features), torch.bfloat16, x)
    if weight.kind is not Kind.BF16:
        raise ValueError(f"the weight must be unpacked to BF16, found {weight.kind.name}.")
    if y.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"y must be torch.bfloat16 or torch.float32, found {y.dtype}.")
    check("y", y, (tokens, weight.out_features), y.dtype, x)
    shape = launch_shape(x.device, tokens, weight.rows)
    math = {key: value for key, value in arithmetic(x.device).items() if key != "PTX"}
    grid = (triton.cdiv(tokens, shape["M"]) * triton.cdiv(weight.rows, shape["N"]),)
    prefill_linear_kernel[grid](
        x, weight.packed, weight.row_scales, y, tokens, OUT=weight.out_features, ROWS=weight.rows,
        IN=weight.in_features, ROW_SCALES=row_scales, ADD=add, **shape, **math,
    )  # fmt: skip


HOPPER = {"M": 128, "N": 256, "K": 64, "SUPER": SUPER, "num_warps": 8, "num_stages": 4}
HOPPER_FEW = (  # tried in this order, until every second multiprocessor has a program
    HOPPER,
    {"M": 64, "N": 128, "K": 64, "SUPER": SUPER, "num_warps": 4, "num_stages": 4},
    {"M": 64, "N": 64, "K": 128, "SUPER": SUPER, "num_warps": 4, "num_stages": 5},
    {"M": 64, "N": 32, "K": 128, "SUPER": SUPER, "num_warps": 4, "num_stages": 6},
)
LITTLE = {"M": 128, "N": 128, "K": 32, "SUPER": SUPER, "num_warps": 8, "num_stages": 4}  # 99 KB of shared memory
AMD = {"M": 128, "N": 128, "K": 32, "SUPER": SUPER, "num_warps": 8, "num_stages": 2}
SMALL = {"M": 64, "N": 128, "K": 128, "SUPER": 2}  # the interpreter's


def launch_shape(device: torch.device, tokens: int, rows: int) -> dict[str, Any]:
    """Tiles only say who computes what: K is walked in steps of one instruction, whose kind is the same for all."""
    if INTERPRETED:
        return SMALL
    shape = pick(device, HOPPER, LITTLE, AMD)
    if shape is not HOPPER:
        return shape
    enough = multiprocessors(device) // 2
    for few in HOPPER_FEW:
        if triton.cdiv(tokens, few["M"]) * triton.cdiv(rows, few["N"]) >= enough:
            return few
    return few
