# Triton types the kernels; Python's annotations cannot. Constants are compared one by one in kernels.
# ruff: noqa: SIM109
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Routed and shared experts of a step in two launches: gate and up with SiLU, then down with the weighted sum.

Each chosen expert's weights are read once per tile of eight pairs; the shared expert's tiles come first in both grids,
since its format may be wider and its programs then last longest. The program that ends a block of 16 columns adds the
experts by rank, the shared expert and the residual stream. No value is ever added by an atomic.
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
    weight_tensors,
)
from stoker.backends.gpu.kernels.linear import Stream
from stoker.backends.gpu.kernels.products import (
    BF16,
    CACHED,
    FP8,
    INT4,
    INT8,
    NVFP4,
    SECOND_LEVEL,
    token_rows,
    unit_products,
    wait_for_inputs,
)
from stoker.backends.gpu.kernels.route import TILE, Routing
from stoker.backends.gpu.packed import GROUP, UNIT, Kind, PackedWeight


@dataclass(frozen=True)
class ExpertBuffers:
    """What lies between the launches, for T tokens and P pairs; the shared expert's rows are the last T."""

    hidden: Tensor  # [P + T, I] bf16
    outputs: Tensor  # [P + T, H] fp32

    @classmethod
    def allocate(cls, tokens: int, top_k: int, inter: int, hidden: int, device: torch.device | str) -> "ExpertBuffers":
        rows = tokens * (top_k + 1)
        return cls(
            torch.empty(rows, inter, dtype=torch.bfloat16, device=device),
            torch.empty(rows, hidden, dtype=torch.float32, device=device),
        )


@triton.jit
def _expert_products(
    x_ptr, x_row, expert, packed_ptr, scales_ptr, row_scales_ptr, unit, apart, KIND: tl.constexpr,
    ROWS: tl.constexpr, IN: tl.constexpr, UNITS: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr, CACHE: tl.constexpr = CACHED,
):  # fmt: skip
    """Units of one expert times eight rows of x, as `token_rows` counts them; -1: no row."""
    ALL_GROUPS: tl.constexpr = IN // 128
    GROUPS: tl.constexpr = ALL_GROUPS // SLICES
    TILES: tl.constexpr = 4 if KIND == BF16 else (2 if KIND == FP8 or KIND == INT8 else 1)
    # distances between experts
    SCALES: tl.constexpr = ROWS * ALL_GROUPS if KIND == INT4 else (
        ROWS * ALL_GROUPS // 16 if KIND == FP8 else (ROWS * ALL_GROUPS * 4 if KIND == NVFP4 else 0))  # fmt: skip
    e = expert.to(tl.int64)
    _, slice = token_rows(SLICES, 8)
    x_ptrs = x_ptr + x_row * IN + slice * (GROUPS * 128) + tl.arange(0, 32)[None, :]
    return unit_products(packed_ptr + e * (ROWS * ALL_GROUPS * TILES * 32), scales_ptr + e * SCALES,
                         row_scales_ptr + e * ROWS, unit, apart, 0, x_ptrs, x_row >= 0, KIND, ROWS, UNITS, SLICES,
                         GROUPS, ALL_GROUPS, 8, AHEAD, CHUNK, PTX, DOT, PDL, CACHE)  # fmt: skip


@triton.jit
def _swiglu(products, inverse, row, unit, hidden_ptr, INTER: tl.constexpr):
    """silu(gate) * up of eight rows of `hidden`; -1: no row."""
    gate = products[0] * inverse[None, :]
    up = products[1] * inverse[None, :]
    y = gate / (1.0 + tl.exp(-gate)) * up
    at = hidden_ptr + row[None, :] * INTER + unit * 16 + tl.arange(0, 16)[:, None]
    tl.store(at, y.to(hidden_ptr.dtype.element_ty), mask=(row >= 0)[None, :])


@triton.jit
def _inverse_rms(x_ptr, first, tokens, IN: tl.constexpr, PADDED: tl.constexpr, EPS: tl.constexpr):
    """[8] fp32 of rows first..first + 7 of the stream, one at a time: a sum's order then follows its size alone."""
    place = tl.arange(0, 8)
    inverse = tl.zeros((8,), tl.float32)
    for row in range(tl.minimum(tokens - first, 8)):
        c = tl.arange(0, PADDED)
        x = tl.load(x_ptr + (first + row) * IN + c, mask=c < IN, other=0.0, cache_modifier=".cg").to(tl.float32)
        inverse = tl.where(place == row, 1.0 / tl.sqrt(tl.sum(x * x, 0) / IN + EPS), inverse)
    return inverse


@triton.jit(do_not_specialize=["tokens", "shared_tiles"])
def gate_up_kernel(
    stream_ptr, x_ptr, rms_ptr, tile_expert_ptr, tile_pairs_ptr, packed_ptr, scales_ptr, row_scales_ptr,
    shared_packed_ptr, shared_scales_ptr, shared_row_scales_ptr, hidden_ptr, tokens, shared_tiles,
    KIND: tl.constexpr, ROWS: tl.constexpr, SHARED_KIND: tl.constexpr, SHARED_ROWS: tl.constexpr, IN: tl.constexpr,
    PADDED: tl.constexpr, EPS: tl.constexpr, TOP_K: tl.constexpr, ONE_TOKEN: tl.constexpr, SLICES: tl.constexpr,
    AHEAD: tl.constexpr, CHUNK: tl.constexpr, SHARED_AHEAD: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, i): units b of gate and of up of the i-th tile. With ONE_TOKEN every pair is a tile and
    `tile_expert_ptr` the token's choice itself. The shared expert needs no choice: it waits for nothing, since the
    stream was written before the launch before this one, and its weights are read while the router chooses."""
    INTER: tl.constexpr = ROWS // 2
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    column = tl.arange(0, 8)
    x_column, _ = token_rows(SLICES, 8)
    if tile < shared_tiles:
        token = tile * 8 + column
        token = tl.where(token < tokens, token, -1)
        x_row = tile * 8 + x_column
        x_row = tl.where(x_row < tokens, x_row, -1)
        products = _expert_products(x_ptr, x_row, tile * 0, shared_packed_ptr, shared_scales_ptr,
                                    shared_row_scales_ptr, unit, SHARED_ROWS // 32, SHARED_KIND, SHARED_ROWS, IN, 2,
                                    SLICES, SHARED_AHEAD, CHUNK, PTX, DOT, False, SECOND_LEVEL)  # fmt: skip
        inverse = _inverse_rms(stream_ptr, tile * 8, tokens, IN, PADDED, EPS)
        _swiglu(products, inverse, tl.where(token >= 0, tokens * TOP_K + token, -1), unit, hidden_ptr, INTER)
    else:
        wait_for_inputs(PDL)
        i = tile - shared_tiles
        expert = tl.load(tile_expert_ptr + i)
        if expert >= 0:
            if ONE_TOKEN:
                pair = tl.where(column == 0, i, -1)
                x_row = tl.where(x_column == 0, 0, -1)
            else:
                pair = tl.load(tile_pairs_ptr + i * 8 + column)
                x_pair = tl.load(tile_pairs_ptr + i * 8 + x_column)
                x_row = tl.where(x_pair >= 0, x_pair // TOP_K, -1)
            inverse = tl.load(rms_ptr + pair // TOP_K, mask=pair >= 0, other=0.0)
            products = _expert_products(x_ptr, x_row, expert, packed_ptr, scales_ptr, row_scales_ptr, unit,
                                        ROWS // 32, KIND, ROWS, IN, 2, SLICES, AHEAD, CHUNK, PTX, DOT,
                                        False)  # fmt: skip
            _swiglu(products, inverse, pair, unit, hidden_ptr, INTER)


@triton.jit
def _combine(outputs_ptr, weights_ptr, shared_ptr, stream_ptr, next_scale_ptr, scaled_ptr, squares_ptr, unit, first,
             tokens, OUT: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr):  # fmt: skip
    """The stream after this layer, 16 columns of tokens first..first + 7: always eight, so that sums have one shape."""
    token = first + tl.arange(0, 8)
    ok = token < tokens
    c = unit * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros((8, 16), tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        weight = tl.load(weights_ptr + pair, mask=ok, other=0.0)
        output = tl.load(outputs_ptr + pair[:, None] * OUT + c, mask=ok[:, None], other=0.0, cache_modifier=".cg")
        total = tl.fma(tl.broadcast_to(weight[:, None], (8, 16)), output, total)
    if SHARED:
        gate = tl.load(shared_ptr + token, mask=ok, other=0.0)
        at = outputs_ptr + (tokens * TOP_K + token)[:, None] * OUT + c
        output = tl.load(at, mask=ok[:, None], other=0.0, cache_modifier=".cg")
        total = tl.fma(tl.broadcast_to(gate[:, None], (8, 16)), output, total)
    at = token[:, None] * OUT + c
    total += tl.load(stream_ptr + at, mask=ok[:, None], other=0.0).to(tl.float32)
    rounded = total.to(stream_ptr.dtype.element_ty)
    value = rounded.to(tl.float32)
    tl.store(stream_ptr + at, rounded, mask=ok[:, None])
    scale = tl.load(next_scale_ptr + c)
    tl.store(scaled_ptr + at, (value * scale).to(scaled_ptr.dtype.element_ty), mask=ok[:, None])
    tl.store(squares_ptr + token * (OUT // 16) + unit, tl.sum(value * value, 1), mask=ok)


@triton.jit(do_not_specialize=["tokens", "shared_tiles"])
def down_kernel(
    hidden_ptr, tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, weights_ptr, shared_ptr, packed_ptr, scales_ptr,
    row_scales_ptr, shared_packed_ptr, shared_scales_ptr, shared_row_scales_ptr, outputs_ptr, stream_ptr,
    next_scale_ptr, scaled_ptr, squares_ptr, counters_ptr, tokens, shared_tiles, KIND: tl.constexpr,
    ROWS: tl.constexpr, SHARED_KIND: tl.constexpr, SHARED: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    ONE_TOKEN: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr,
    SHARED_AHEAD: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, i): unit b of the i-th tile; the last tile of a unit combines it for all tokens. Which experts there
    are was known before the launch before this one, so their weights need not wait for it."""
    unit = tl.program_id(0)
    tile = tl.program_id(1)
    column = tl.arange(0, 8)
    x_column, _ = token_rows(SLICES, 8)
    row = unit * 16 + tl.arange(0, 16)[:, None]
    live = tile < shared_tiles
    if tile < shared_tiles:
        token = tile * 8 + column
        output = tl.where(token < tokens, tokens * TOP_K + token, -1)
        x_token = tile * 8 + x_column
        x_row = tl.where(x_token < tokens, tokens * TOP_K + x_token, -1)
        products = _expert_products(hidden_ptr, x_row, tile * 0, shared_packed_ptr, shared_scales_ptr,
                                    shared_row_scales_ptr, unit, 1, SHARED_KIND, ROWS, IN, 1, SLICES, SHARED_AHEAD,
                                    CHUNK, PTX, DOT, PDL)  # fmt: skip
        tl.store(outputs_ptr + output[None, :] * OUT + row, products[0], mask=(output >= 0)[None, :])
    else:
        i = tile - shared_tiles
        expert = tl.load(tile_expert_ptr + i, cache_modifier=".cg")
        live = expert >= 0
        if expert >= 0:
            if ONE_TOKEN:
                pair = tl.where(column == 0, i, -1)
                x_row = tl.where(x_column == 0, i, -1)
            else:
                pair = tl.load(tile_pairs_ptr + i * 8 + column, cache_modifier=".cg")
                x_row = tl.load(tile_pairs_ptr + i * 8 + x_column, cache_modifier=".cg")
            products = _expert_products(hidden_ptr, x_row, expert, packed_ptr, scales_ptr, row_scales_ptr, unit,
                                        1, KIND, ROWS, IN, 1, SLICES, AHEAD, CHUNK, PTX, DOT, PDL)  # fmt: skip
            tl.store(outputs_ptr + pair[None, :] * OUT + row, products[0], mask=(pair >= 0)[None, :])
    if live:
        tl.debug_barrier()
        expected = tl.load(tile_count_ptr) + shared_tiles
        counter = counters_ptr + unit * APART
        if tl.atomic_add(counter, 1, sem="acq_rel") == expected - 1:
            tl.debug_barrier()
            for first in range(0, tokens, 8):
                _combine(outputs_ptr, weights_ptr, shared_ptr, stream_ptr, next_scale_ptr, scaled_ptr, squares_ptr,
                         unit, first, tokens, OUT, TOP_K, SHARED)  # fmt: skip
            tl.store(counter, 0)


def experts(
    stream: Stream,
    routing: Routing,
    gate_up: PackedWeight,
    down: PackedWeight,
    shared_gate_up: PackedWeight | None,
    shared_down: PackedWeight | None,
    buffers: ExpertBuffers,
    squares: Tensor,
    workspace: Workspace,
    next_scale: Tensor,
    *,
    eps: float,
    pdl: bool = False,
) -> None:
    """Adds a layer's experts to `stream`, whose `scaled` [T, H] is the stream times the norm's weight.

    gate_up [E, 2I, H] with the gate rows first, down [E, H, I]; shared ones without E. Afterwards `scaled` is the
    stream times `next_scale`, and `squares` [T, H/16] add up to its sums of squares.
    """
    x = stream.scaled
    check_tokens(x, gate_up.in_features)
    tokens, hidden = x.shape
    inter, top_k = down.in_features, routing.top_k
    _check_weights(gate_up, down, shared_gate_up, shared_down, x)
    check("stream.x", stream.x, (tokens, hidden), torch.bfloat16, x)
    check("next_scale", next_scale, (hidden,), torch.float32, x)
    check("squares", squares, (tokens, hidden // UNIT), torch.float32, x)
    check("buffers.hidden", buffers.hidden, (tokens * (top_k + 1), inter), torch.bfloat16, x)
    check("buffers.outputs", buffers.outputs, (tokens * (top_k + 1), hidden), torch.float32, x)
    check("routing.experts", routing.experts, (tokens, top_k), torch.int32, x)
    check_workspace(workspace, 0, hidden // UNIT)
    one = tokens == 1
    tiles = routing.experts if one else routing.tile_expert
    first, second = shared_gate_up or gate_up, shared_down or down
    shared_tiles = triton.cdiv(tokens, TILE) if shared_gate_up else 0
    common = {"TOP_K": top_k, "ONE_TOKEN": one, "KIND": int(gate_up.kind),
              "SHARED_KIND": int(first.kind), **arithmetic(x.device), **dependent(x.device, pdl)}  # fmt: skip
    grid = shared_tiles + tokens * top_k
    gate_up_kernel[(inter // UNIT, grid)](
        stream.x, x, routing.inverse_rms, tiles, routing.tile_pairs, *weight_tensors(gate_up), *weight_tensors(first),
        buffers.hidden, tokens, shared_tiles, ROWS=gate_up.rows, SHARED_ROWS=first.rows, IN=hidden,
        PADDED=triton.next_power_of_2(hidden), EPS=eps, **common,
        **launch_shape(tokens, hidden, gated=True, kinds=(gate_up.kind, first.kind)),
    )  # fmt: skip
    down_kernel[(hidden // UNIT, grid)](
        buffers.hidden, tiles, routing.tile_pairs, routing.tile_count, routing.weights, routing.shared,
        *weight_tensors(down), *weight_tensors(second), buffers.outputs, stream.x, next_scale, x, squares,
        workspace.counters, tokens, shared_tiles, ROWS=down.rows, IN=inter, OUT=hidden, SHARED=shared_tiles > 0,
        **common,
        **launch_shape(tokens, inter, gated=False, kinds=(down.kind, second.kind)),
    )  # fmt: skip


def launch_shape(tokens: int, in_features: int, gated: bool, kinds: tuple[Kind, Kind]) -> dict[str, Any]:
    """Slices decide the order of the sum and follow the weight's shape alone; the rest changes no bit.

    Measured on an H200 with INT4 experts (benchmarks/gpu/tune.py). Wider formats ask for weights as far ahead as
    registers last. Of one token nearly all programs of gate and up run at once, and each asks for more.
    """
    groups = in_features // GROUP
    slices = slice_count(groups) if gated else 1
    ahead = {1: 4 if tokens == 1 else 2, 2: 3, 4: 1} if gated else {1: 4, 2: 4, 4: 1}  # by tiles: 4, 8 and 16 bit
    return {
        "SLICES": slices,
        "AHEAD": ahead[kinds[0].tiles],
        "SHARED_AHEAD": ahead[kinds[1].tiles],
        "CHUNK": chunk_size(groups // slices),
        "num_warps": slices,
        **register_limit(128),
    }


def _check_weights(
    gate_up: PackedWeight,
    down: PackedWeight,
    shared_gate_up: PackedWeight | None,
    shared_down: PackedWeight | None,
    like: Tensor,
) -> None:
    hidden, inter = gate_up.in_features, down.in_features
    check_weight("gate_up", gate_up, like, experts=True)
    check_weight("down", down, like, experts=True)
    if gate_up.kind is not down.kind:
        raise ValueError(f"gate_up is {gate_up.kind.name} and down {down.kind.name}: they must be of one format.")
    if gate_up.rows != 2 * inter or gate_up.out_features != 2 * inter or down.out_features != hidden:
        raise ValueError(
            f"gate_up must be [experts, {2 * inter}, {hidden}] for a down of [experts, {hidden}, {inter}], "
            f"found {[gate_up.out_features, hidden]} and {[down.out_features, inter]}."
        )
    if hidden % (2 * UNIT):
        raise ValueError(f"the hidden size must be a multiple of {2 * UNIT}, found {hidden}.")
    if (shared_gate_up is None) != (shared_down is None):
        raise ValueError("shared_gate_up and shared_down belong together: give both or none.")
    if shared_gate_up is None or shared_down is None:
        return
    check_weight("shared_gate_up", shared_gate_up, like)
    check_weight("shared_down", shared_down, like)
    if shared_gate_up.kind is not shared_down.kind:
        raise ValueError(
            f"shared_gate_up is {shared_gate_up.kind.name} and shared_down {shared_down.kind.name}: "
            "they must be of one format."
        )
    found = (shared_gate_up.rows, shared_gate_up.in_features, shared_down.rows, shared_down.in_features)
    if found != (2 * inter, hidden, hidden, inter):
        raise ValueError(
            f"the shared expert must be as wide as the routed ones, [{2 * inter}, {hidden}] and [{hidden}, {inter}], "
            f"found {list(found[:2])} and {list(found[2:])}."
        )
