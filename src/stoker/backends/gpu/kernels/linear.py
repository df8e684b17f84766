# Triton types the kernels; Python's annotations cannot. Its branches on constants must keep their else.
# ruff: noqa: RET505
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Projections of a step, 1 to 128 rows, weights of any format: what surrounds them is done on the way.

In: the rows may be a stream times a norm's weight, and are divided by their root mean square when the sum is done.
Out: plain; added to the residual stream and prepared for the next norm; or, for the head, the largest logit of every
16 rows in place of the logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.launch import (
    APART,
    Workspace,
    arithmetic,
    check,
    check_tokens,
    check_weight,
    check_workspace,
    chunk_size,
    dependent,
    register_limit,
    slice_count,
    weight_shape,
    weight_tensors,
)
from stoker.backends.gpu.kernels.products import row_sums, token_rows, unit_products
from stoker.backends.gpu.packed import GROUP, UNIT, Kind, PackedWeight

PLAIN = tl.constexpr(0)
STREAM = tl.constexpr(1)
BEST = tl.constexpr(2)
NO_INDEX = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Norm:
    """The rows of x are a stream times a norm's weight; `squares` [T, parts] add up to a row's sum of squares."""

    squares: Tensor
    eps: float


@dataclass(frozen=True)
class Stream:
    """The residual stream [T, H] bf16, updated in place, and where to put it times the next norm's weight [H] fp32."""

    x: Tensor
    next_scale: Tensor
    scaled: Tensor


@dataclass(frozen=True)
class Best:
    """The largest logit of every 16 rows and its row [T, rows/16]; and all of them [T, out] fp32, if wanted."""

    values: Tensor
    rows: Tensor
    logits: Tensor | None = None


@triton.jit
def _inverse_rms(squares_ptr, first, tokens, PARTS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr,
                 EPS: tl.constexpr):  # fmt: skip
    """[8] fp32 of rows first..first + 7."""
    row = first + tl.arange(0, 8)[:, None]
    part = tl.arange(0, PADDED)[None, :]
    squares = tl.load(squares_ptr + row * PARTS + part, mask=(row < tokens) & (part < PARTS), other=0.0)
    return 1.0 / tl.sqrt(tl.reshape(row_sums(squares, PADDED), (8,)) / SIZE + EPS)


@triton.jit
def inverse_rms(squares_ptr, first, tokens, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
                SIZE: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    """[1, COLUMNS], 8 or 16."""
    low = _inverse_rms(squares_ptr, first, tokens, PARTS, PADDED, SIZE, EPS)
    if COLUMNS == 8:
        return low[None, :]
    else:
        high = _inverse_rms(squares_ptr, first + 8, tokens, PARTS, PADDED, SIZE, EPS)
        return tl.reshape(tl.permute(tl.join(low, high), (1, 0)), (1, 16))


@triton.jit
def _finish(product, unit, row, column, tokens, y_ptr, next_scale_ptr, scaled_ptr, index_ptr, logits_ptr,
            OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUT: tl.constexpr, LOGITS: tl.constexpr):  # fmt: skip
    """`product` [16, COLUMNS] to where it belongs."""
    ok = (column < tokens) & (row < OUT)
    at = column * OUT + row
    if OUTPUT == STREAM:
        total = tl.load(y_ptr + at, mask=ok, other=0.0).to(tl.float32) + product
        rounded = total.to(y_ptr.dtype.element_ty)
        scale = tl.load(next_scale_ptr + row, mask=row < OUT, other=0.0)
        tl.store(y_ptr + at, rounded, mask=ok)
        tl.store(scaled_ptr + at, (rounded.to(tl.float32) * scale).to(scaled_ptr.dtype.element_ty), mask=ok)
    elif OUTPUT == BEST:
        if LOGITS:
            tl.store(logits_ptr + column.to(tl.int64) * OUT + row, product, mask=ok)
        found = tl.where(row < OUT, product, float("-inf"))
        best = tl.max(found, 0)[None, :]
        index = tl.min(tl.where(found == best, row, NO_INDEX), 0)[None, :]
        block = column * (ROWS // 16) + unit
        tl.store(y_ptr + block, best, mask=column < tokens)
        tl.store(index_ptr + block, index, mask=column < tokens)
    else:
        tl.store(y_ptr + at, product.to(y_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x_ptr, packed_ptr, scales_ptr, row_scales_ptr, y_ptr, partial_ptr, counters_ptr, squares_ptr, next_scale_ptr,
    scaled_ptr, index_ptr, logits_ptr, tokens, OUT: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    IN: tl.constexpr, OUTPUT: tl.constexpr, LOGITS: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
    PADDED: tl.constexpr, EPS: tl.constexpr, UNITS: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, t, s): the b-th UNITS units of rows, the t-th COLUMNS tokens, the s-th part of the inputs."""
    ALL_GROUPS: tl.constexpr = IN // 128
    GROUPS: tl.constexpr = ALL_GROUPS // (SLICES * SPLIT)
    unit = tl.program_id(0) * UNITS
    part = tl.program_id(2)
    first = tl.program_id(1) * COLUMNS
    token, slice = token_rows(SLICES, COLUMNS)
    token += first
    x_ptrs = x_ptr + token * IN + (part * SLICES + slice) * (GROUPS * 128) + tl.arange(0, 32)[None, :]
    products = unit_products(packed_ptr, scales_ptr, row_scales_ptr, unit, 1, part, x_ptrs, token < tokens, KIND,
                             ROWS, UNITS, SLICES, GROUPS, ALL_GROUPS, COLUMNS, AHEAD, CHUNK, PTX, DOT,
                             PDL)  # fmt: skip
    column = first + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, 16)[:, None]
    if SPLIT == 1:
        for u in tl.static_range(UNITS):
            product = products[u]
            if NORM:
                product = product * inverse_rms(squares_ptr, first, tokens, COLUMNS, PARTS, PADDED, IN, EPS)
            _finish(product, unit + u, (unit + u) * 16 + row, column, tokens, y_ptr, next_scale_ptr, scaled_ptr,
                    index_ptr, logits_ptr, OUT, ROWS, OUTPUT, LOGITS)  # fmt: skip
    else:
        for u in tl.static_range(UNITS):
            at = partial_ptr + (part * tokens + column) * ROWS + (unit + u) * 16 + row
            tl.store(at, products[u], mask=column < tokens)
        # The program that comes last adds the parts, always from the first to the last.
        tl.debug_barrier()
        counter = counters_ptr + (tl.program_id(1) * (ROWS // 16) + tl.program_id(0)) * APART
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            tl.debug_barrier()
            for u in tl.static_range(UNITS):
                total = tl.zeros((16, COLUMNS), tl.float32)
                for p in tl.static_range(SPLIT):
                    at = partial_ptr + (p * tokens + column) * ROWS + (unit + u) * 16 + row
                    total += tl.load(at, mask=column < tokens, other=0.0, cache_modifier=".cg")
                if NORM:
                    total = total * inverse_rms(squares_ptr, first, tokens, COLUMNS, PARTS, PADDED, IN, EPS)
                _finish(total, unit + u, (unit + u) * 16 + row, column, tokens, y_ptr, next_scale_ptr, scaled_ptr,
                        index_ptr, logits_ptr, OUT, ROWS, OUTPUT, LOGITS)  # fmt: skip
            tl.store(counter, 0)


def linear(
    x: Tensor,
    weight: PackedWeight,
    out: Tensor | Stream | Best,
    workspace: Workspace,
    norm: Norm | None = None,
    pdl: bool = False,
) -> None:
    """x [T, in] bf16 times weight [out, in] into `out`: a tensor [T, out], bf16 or fp32, or as `Stream`, `Best` say."""
    check_tokens(x, weight.in_features)
    check_weight("weight", weight, x)
    tokens = x.shape[0]
    y, arguments = _output(out, weight, x)
    shape = launch_shape(tokens, weight.rows, weight.in_features, weight.kind)
    split, blocks = shape["SPLIT"], triton.cdiv(tokens, shape["COLUMNS"])
    if split > 1:
        check_workspace(workspace, split * tokens * weight.rows, blocks * weight.rows // UNIT)
    parts = 1
    if norm is not None:
        parts = norm.squares.shape[-1]
        check("squares", norm.squares, (tokens, parts), torch.float32, x)
    grid = (weight.rows // (UNIT * shape["UNITS"]), blocks, split)
    linear_kernel[grid](
        x, *weight_tensors(weight), y, workspace.partial, workspace.counters, norm.squares if norm else y,
        **arguments, tokens=tokens, OUT=weight.out_features, NORM=norm is not None, PARTS=parts,
        PADDED=triton.next_power_of_2(parts), EPS=norm.eps if norm else 0.0, **weight_shape(weight), **shape,
        **arithmetic(x.device), **dependent(x.device, pdl),
    )  # fmt: skip


def _output(out: Tensor | Stream | Best, weight: PackedWeight, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Where the kernel stores, and its other arguments for that."""
    tokens, features, units = x.shape[0], weight.out_features, weight.rows // UNIT
    unused = dict.fromkeys(("next_scale_ptr", "scaled_ptr", "index_ptr", "logits_ptr"), x)
    if isinstance(out, Stream):
        check("stream.x", out.x, (tokens, features), torch.bfloat16, x)
        check("stream.scaled", out.scaled, (tokens, features), torch.bfloat16, x)
        check("stream.next_scale", out.next_scale, (features,), torch.float32, x)
        used = {"next_scale_ptr": out.next_scale, "scaled_ptr": out.scaled}
        return out.x, {**unused, **used, "OUTPUT": STREAM.value, "LOGITS": False}
    if isinstance(out, Best):
        check("best.values", out.values, (tokens, units), torch.float32, x)
        check("best.rows", out.rows, (tokens, units), torch.int32, x)
        used = {"index_ptr": out.rows}
        if out.logits is not None:
            check("best.logits", out.logits, (tokens, features), torch.float32, x)
            used["logits_ptr"] = out.logits
        return out.values, {**unused, **used, "OUTPUT": BEST.value, "LOGITS": out.logits is not None}
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be torch.bfloat16 or torch.float32, found {out.dtype}.")
    check("out", out, (tokens, features), out.dtype, x)
    return out, {**unused, "OUTPUT": PLAIN.value, "LOGITS": False}


def launch_shape(tokens: int, rows: int, in_features: int, kind: Kind = Kind.INT4) -> dict[str, Any]:
    """How the work is cut. Slices and split decide the order of the sum, so they follow the weight's shape alone.

    The rest was measured on an H200 with INT4 (benchmarks/gpu/kernels.py) and changes no bit of the result.
    """
    groups = in_features // GROUP
    slices = slice_count(groups)
    # Too few rows to fill a GPU: two programs share a row's inputs.
    split = 2 if rows <= 8192 and groups >= 32 and groups % (2 * slices) == 0 else 1
    cut: dict[str, Any]
    if split > 1:
        cut = {"UNITS": 1, "AHEAD": 4 if kind.tiles == 1 else 1, **register_limit(128)}
    elif kind is Kind.INT8 and tokens <= 8:
        cut = {"UNITS": 1, "AHEAD": 3, **register_limit(80)}
    elif kind is not Kind.INT4:  # not measured yet: enough registers for two groups of weights in flight
        cut = {"UNITS": 1, "AHEAD": 1, **register_limit(96 if tokens <= 8 else 128)}
    else:
        cut = {"UNITS": 1, "AHEAD": 1, **({} if tokens <= 8 else register_limit(96))}
    columns = 8 if tokens <= 8 else 16
    chunk = chunk_size(groups // (slices * split))
    return {"SLICES": slices, "SPLIT": split, "COLUMNS": columns, "CHUNK": chunk, "num_warps": slices, **cut}
