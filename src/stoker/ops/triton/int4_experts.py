# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Routed INT4 experts of a step: each chosen expert's weights are read once for all tokens that chose it.

Pairs (token, rank) of one expert form tiles of eight columns. Four launches: tiles, gate and up with SwiGLU, down,
and the weighted sum in order of rank. No value is ever added by an atomic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.ops.dispatch import register
from stoker.ops.int4_linear import GROUP, UNIT, PackedInt4
from stoker.ops.triton.int4_linear import (
    arithmetic,
    check_tokens,
    check_weight,
    chunk_size,
    register_limit,
    slice_count,
    token_rows,
    unit_products,
)

TILE = 8  # columns: the narrowest matrix instruction; 16 tokens bring 1.3 pairs to an expert they choose
COMBINE_BLOCK = 512


@triton.jit(do_not_specialize=["pairs"])
def tiles_kernel(experts_ptr, tile_expert_ptr, tile_pairs_ptr, pairs, PADDED: tl.constexpr):
    """Program i: tile i holds pair i and the 7 after it if pair i is the 1st, 9th, .. of its expert, else nothing."""
    i = tl.program_id(0)
    p = tl.arange(0, PADDED)
    expert = tl.load(experts_ptr + i)
    same = tl.load(experts_ptr + p, mask=p < pairs, other=-1) == expert
    before = tl.sum((same & (p < i)).to(tl.int32), 0)
    first = before % 8 == 0
    column = tl.cumsum(same.to(tl.int32), 0) - 1 - before  # of each pair of this expert, counted from pair i
    c = tl.arange(0, 8)
    mine = same[None, :] & (column[None, :] == c[:, None]) & first
    tl.store(tile_pairs_ptr + i * 8 + c, tl.max(tl.where(mine, p[None, :], -1), 1))
    tl.store(tile_expert_ptr + i, tl.where(first, expert, -1))


@triton.jit
def experts_kernel(
    x_ptr, experts_ptr, tile_pairs_ptr, packed_ptr, scales_ptr, y_ptr, OUT: tl.constexpr,
    ROWS: tl.constexpr, IN: tl.constexpr, GATED: tl.constexpr, TOP_K: tl.constexpr, ONE_TOKEN: tl.constexpr,
    SLICES: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (b, i): unit b of the expert of tile i, for the pairs of that tile.

    GATED: x has a row per token, units b of gate and of up are multiplied, y is silu(gate) * up. Else x has a row
    per pair and y is the product. With ONE_TOKEN every pair is a tile and `experts_ptr` the token's choice itself.
    """
    ALL_GROUPS: tl.constexpr = IN // 128
    GROUPS: tl.constexpr = ALL_GROUPS // SLICES
    UNITS: tl.constexpr = 2 if GATED else 1
    block = tl.program_id(0)
    i = tl.program_id(1)
    expert = tl.load(experts_ptr + i)
    if expert < 0:
        return
    column = tl.arange(0, 8)
    x_column, slice = token_rows(SLICES, 8)
    if ONE_TOKEN:
        pair = tl.where(column == 0, i, -1)
        x_pair = tl.where(x_column == 0, i, -1)
    else:
        pair = tl.load(tile_pairs_ptr + i * 8 + column)
        x_pair = tl.load(tile_pairs_ptr + i * 8 + x_column)
    x_row = x_pair // TOP_K if GATED else x_pair
    x_ptrs = x_ptr + x_row * IN + slice * (GROUPS * 128) + tl.arange(0, 32)[None, :]
    packed_ptr += expert.to(tl.int64) * (ROWS * IN // 4) + block * (ALL_GROUPS * 512)
    scales_ptr += expert.to(tl.int64) * (ROWS * ALL_GROUPS) + block * 16
    up_words: tl.constexpr = OUT // 32 * (ALL_GROUPS * 512)
    products = unit_products(packed_ptr, scales_ptr, up_words, OUT // 2, x_ptrs, x_pair >= 0, ROWS, UNITS,
                             SLICES, GROUPS, 8, AHEAD, CHUNK, PTX, DOT)  # fmt: skip
    row = block * 16 + tl.arange(0, 16)[:, None]
    ok = (pair >= 0)[None, :]
    if GATED:
        gate = products[0]
        y = gate / (1.0 + tl.exp(-gate)) * products[1]
        tl.store(y_ptr + pair[None, :] * (OUT // 2) + row, y.to(y_ptr.dtype.element_ty), mask=ok)
    else:
        tl.store(y_ptr + pair[None, :] * OUT + row, products[0], mask=ok & (row < OUT))


@triton.jit
def combine_kernel(outputs_ptr, weights_ptr, y_ptr, OUT: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        output = tl.load(outputs_ptr + pair * OUT + c, mask=c < OUT, other=0.0)
        total = tl.fma(tl.broadcast_to(tl.load(weights_ptr + pair), (BLOCK,)), output, total)
    tl.store(y_ptr + token * OUT + c, total, mask=c < OUT)


def int4_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: PackedInt4, down: PackedInt4) -> Tensor:
    """fp32 [T, H] from x [T, H] bf16, experts [T, top_k] int32, weights [T, top_k] fp32; T <= 128."""
    _check(x, experts, weights, gate_up, down)
    tokens, top_k = experts.shape
    pairs = tokens * top_k
    tile_expert, tile_pairs = expert_tiles(experts) if tokens > 1 else (experts, experts)
    math = arithmetic(x.device)
    hidden = x.new_empty(pairs, down.in_features)
    units = down.in_features // UNIT
    experts_kernel[(units, pairs)](
        x, tile_expert, tile_pairs, gate_up.packed, gate_up.scales, hidden, OUT=gate_up.out_features,
        ROWS=gate_up.rows, IN=gate_up.in_features, GATED=True, TOP_K=top_k, ONE_TOKEN=tokens == 1,
        **launch_shape(gate_up.in_features, gated=True), **math,
    )  # fmt: skip
    outputs = x.new_empty(pairs, down.out_features, dtype=torch.float32)
    experts_kernel[(down.rows // UNIT, pairs)](
        hidden, tile_expert, tile_pairs, down.packed, down.scales, outputs, OUT=down.out_features,
        ROWS=down.rows, IN=down.in_features, GATED=False, TOP_K=top_k, ONE_TOKEN=tokens == 1,
        **launch_shape(down.in_features, gated=False), **math,
    )  # fmt: skip
    y = x.new_empty(tokens, down.out_features, dtype=torch.float32)
    combine_kernel[(triton.cdiv(down.out_features, COMBINE_BLOCK), tokens)](
        outputs, weights, y, OUT=down.out_features, TOP_K=top_k, BLOCK=COMBINE_BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return y


def expert_tiles(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Each tile's expert, -1 for an empty tile [pairs], and its pairs, -1 for an unused column [pairs, 8]."""
    pairs = experts.numel()
    tile_expert = torch.empty_like(experts).view(-1)
    tile_pairs = experts.new_empty(pairs, TILE)
    padded = triton.next_power_of_2(pairs)
    tiles_kernel[(pairs,)](
        experts, tile_expert, tile_pairs, pairs, PADDED=padded, num_warps=1 if padded <= 256 else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return tile_expert, tile_pairs


def launch_shape(in_features: int, gated: bool) -> dict[str, Any]:
    """Slices decide the order of the sum and follow the weight's shape alone; the rest changes no bit."""
    groups = in_features // GROUP
    slices = slice_count(groups) if gated else 1
    ahead, registers = (1, 128) if gated else (4, 96)  # measured on an H200
    chunk = chunk_size(groups // slices)
    return {
        "SLICES": slices,
        "AHEAD": ahead,
        "CHUNK": chunk,
        "num_warps": slices,
        **register_limit(registers),
    }


def _check(x: Tensor, experts: Tensor, weights: Tensor, gate_up: PackedInt4, down: PackedInt4) -> None:
    check_tokens(x, gate_up.in_features)
    check_weight("gate_up", gate_up, x, dimensions=5)
    check_weight("down", down, x, dimensions=5)
    if gate_up.out_features != 2 * down.in_features or gate_up.packed.shape[0] != down.packed.shape[0]:
        raise ValueError(
            f"gate_up must be [{down.packed.shape[0]}, {2 * down.in_features}, hidden] for a down of "
            f"{[down.packed.shape[0], down.out_features, down.in_features]}, "
            f"found {[gate_up.packed.shape[0], gate_up.out_features, gate_up.in_features]}."
        )
    if experts.dim() != 2 or experts.shape[0] != x.shape[0] or weights.shape != experts.shape:
        raise ValueError(
            f"experts and weights must both be [{x.shape[0]}, top_k], "
            f"found {list(experts.shape)} and {list(weights.shape)}."
        )
    for name, tensor, dtype in (("experts", experts, torch.int32), ("weights", weights, torch.float32)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, found {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device} like x, found {tensor.device}.")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}.")


register("int4_experts", int4_experts)
