# Triton types the kernels; Python's annotations cannot. Its branches on constants must keep their else.
# ruff: noqa: SIM108, SIM109
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="misc"
"""Routed experts of a prompt: pairs of (token, expert) sorted by expert, then gate and up, SiLU, down.

Tokens of one expert form tiles of 64, or of 32 or 16 where they are few. Weights go from memory through a conversion in
registers straight into the operand of a matrix instruction, as in a step; to that end activations lie in operand order,
inputs renumbered within each 32 (docs/gpu.md). A pair's bits depend on its token and its expert alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.launch import INTERPRETED, arithmetic, check, check_weight, weight_tensors
from stoker.backends.gpu.kernels.products import BF16, FP8, INT4, INT8, NVFP4, _lane_scale, _unpack, _weight_operand
from stoker.backends.gpu.packed import UNIT, PackedWeight

TILES = (16, 32, 64)  # pairs of a tile
# Pairs an expert has on average, up to which the smaller ones serve: 768 and 1,024 tokens at top-8 of 256. Measured on
# an H200: 106 and 430 tokens take 0.47 and 0.46 ms a layer in tiles of 16, 0.89 and 0.75 in tiles of 32; 1,024 tokens
# 0.86 and 0.83.
FEW = (24, 32)
WARPS = 8  # 16 rows of the weight each
FUSION: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}
SCANNED = 2048  # pairs that a program looks at at a time


@dataclass(frozen=True)
class PairTiles:
    """Pair p is rank p % top_k of token p // top_k. A tile holds up to `tile_size` pairs of one expert in rising order;
    its size changes no bit of what is computed."""

    counts: Tensor  # [experts] int32
    tile_expert: Tensor  # int32, for each tile
    tile_pairs: Tensor  # int32, tile after tile, -1: an unused place
    tile_count: Tensor  # [1] int32: tiles in use

    @classmethod
    def allocate(cls, pairs: int, experts: int, device: torch.device | str) -> "PairTiles":
        """For up to so many pairs."""

        def empty(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=device)

        tiles = max(most_tiles(min(pairs, few * experts), experts) for few in (*FEW, pairs))
        return cls(empty(experts), empty(tiles), empty(pairs + experts * TILES[-1]), empty(1))


def tile_size(pairs: int, experts: int) -> int:
    return next((size for size, few in zip(TILES, FEW, strict=False) if pairs <= few * experts), TILES[-1])


def most_tiles(pairs: int, experts: int) -> int:
    """Each expert may leave one tile that is not full."""
    return pairs // tile_size(pairs, experts) + min(pairs, experts)


@triton.jit
def operand_column(k):
    """Where input k is stored: within 32, inputs counted (c, step, low) lie as (step, c, low)."""
    return k // 32 * 32 + k // 2 % 4 * 8 + k // 8 % 4 * 2 + k % 2


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(experts_ptr, counts_ptr, pairs, BLOCK: tl.constexpr):
    """Program e: pairs of expert e."""
    i = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        expert = tl.load(experts_ptr + start + i, mask=start + i < pairs, other=-1)
        found += (expert == tl.program_id(0)).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs"])
def pair_tiles_kernel(
    experts_ptr, counts_ptr, tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, pairs, EXPERTS: tl.constexpr,
    PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e: the tiles of expert e."""
    me = tl.program_id(0)
    e = tl.arange(0, PADDED)
    tiles = (tl.load(counts_ptr + e, mask=e < EXPERTS, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(e < me, tiles, 0), 0)
    if me == EXPERTS - 1:
        tl.store(tile_count_ptr, tl.sum(tiles, 0))
    mine = tl.load(counts_ptr + me)
    if mine > 0:
        place = tile_pairs_ptr + first * TILE
        before = tl.zeros((), tl.int32)
        for start in range(0, pairs, BLOCK):
            i = start + tl.arange(0, BLOCK)
            same = tl.load(experts_ptr + i, mask=i < pairs, other=-1) == me
            rank = before + tl.cumsum(same.to(tl.int32), 0) - 1
            tl.store(place + rank, i, mask=same)
            before += tl.sum(same.to(tl.int32), 0)
        rest = mine + tl.arange(0, TILE)
        tl.store(place + rest, -1, mask=rest < (mine + TILE - 1) // TILE * TILE)
        for t in range((mine + TILE - 1) // TILE):
            tl.store(tile_expert_ptr + first + t, me)


@triton.jit
def _tile_products(
    x_ptr, x_row, expert, packed_ptr, scales_ptr, row_scales_ptr, block, apart, KIND: tl.constexpr,
    ROWS: tl.constexpr, IN: tl.constexpr, WARPS: tl.constexpr, M: tl.constexpr, PTX: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """[WARPS * 16, M] fp32: rows of one expert times rows `x_row` [M] of x, -1: none.

    Warp w has 8 rows from 16 * (WARPS * block + w) on and the 8 after them; or, if `apart` > 0, 8 rows from
    8 * (WARPS * block + w) on and the 8 that lie `apart` rows further: then one thread has both.
    """
    GROUPS: tl.constexpr = IN // 128
    TILES: tl.constexpr = 4 if KIND == BF16 else (2 if KIND == FP8 or KIND == INT8 else 1)
    SCALES: tl.constexpr = ROWS * GROUPS if KIND == INT4 else (
        ROWS * GROUPS // 16 if KIND == FP8 else (ROWS * GROUPS * 4 if KIND == NVFP4 else 0))  # fmt: skip
    e = expert.to(tl.int64)
    packed_ptr += e * (ROWS * GROUPS * TILES * 32)
    scales_ptr += e * SCALES
    row_scales_ptr += e * ROWS
    # eight rows of a tile are 512 bytes in a row, for one warp
    r = tl.arange(0, 2 * WARPS)[:, None]
    strip = _first_row(r // WARPS, r % WARPS, block, apart, WARPS)
    words = packed_ptr + strip // 16 * (GROUPS * TILES * 512) + strip % 16 * 32 + tl.arange(0, 256)[None, :]
    lanes = scales_ptr + strip // 16 * (GROUPS * 64) + strip % 16 * 4 + tl.arange(0, 32)[None, :]
    m = tl.arange(0, WARPS * 16)
    row = _first_row(m % 16 // 8, m // 16, block, apart, WARPS) + m % 8
    x_ptrs = x_ptr + tl.where(x_row >= 0, x_row, 0).to(tl.int64)[:, None] * IN + tl.arange(0, 128)[None, :]
    total = tl.zeros((WARPS * 16, M), tl.float32)
    for g in range(GROUPS):
        quarters = ()
        for tile in tl.static_range(TILES):
            quarters += _unpack(tl.load(words + (g * TILES + tile) * 512), KIND, PTX, DOT)
        w0, w1, w2, w3 = quarters
        if KIND == NVFP4:
            scale = tl.load(lanes + g * 64)
            w0 = w0 * _lane_scale(scale, 0, WARPS, DOT)
            w1 = w1 * _lane_scale(scale, 1, WARPS, DOT)
            w2 = w2 * _lane_scale(scale, 2, WARPS, DOT)
            w3 = w3 * _lane_scale(scale, 3, WARPS, DOT)
        # the four quarters side by side: one product of 128 inputs, nothing moves between threads
        w = tl.join(
            tl.join(_operand(w0, WARPS), _operand(w1, WARPS)), tl.join(_operand(w2, WARPS), _operand(w3, WARPS))
        )
        w = tl.reshape(tl.permute(w, (0, 3, 2, 1)), (WARPS * 16, 128))
        x = tl.trans(tl.load(x_ptrs + g * 128).to(DOT))
        if KIND == INT4 or KIND == FP8:
            d = tl.dot(w, x)
        else:
            d = tl.dot(w, x, total)
        if KIND == INT4:
            scale = tl.load(scales_ptr + g * ROWS + row).to(tl.float32)
            total = tl.fma(d, tl.broadcast_to(scale[:, None], d.shape), total)
        elif KIND == FP8:
            scale = tl.load(scales_ptr + g * (ROWS // 16) + row // 16)
            total = tl.fma(d, tl.broadcast_to(scale[:, None], d.shape), total)
        else:
            total = d
    if KIND == INT8 or KIND == NVFP4:
        total = total * tl.load(row_scales_ptr + row)[:, None]
    return total


@triton.jit
def _operand(w, WARPS: tl.constexpr):
    return tl.reshape(_weight_operand(w, WARPS), (WARPS * 16, 32))


@triton.jit
def _first_row(half, warp, block, apart, WARPS: tl.constexpr):
    together = (block * WARPS + warp) * 16 + half * 8
    return tl.where(apart > 0, (block * WARPS + warp) * 8 + half * apart, together)


@triton.jit
def prefill_gate_up_kernel(
    x_ptr, packed_ptr, scales_ptr, row_scales_ptr, tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, hidden_ptr,
    KIND: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr, TOP_K: tl.constexpr, WARPS: tl.constexpr,
    TILE: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (b, i): 8 * WARPS columns of silu(gate) * up for tile i; `hidden` is in operand order."""
    INTER: tl.constexpr = ROWS // 2
    tile = tl.program_id(1)
    if tile < tl.load(tile_count_ptr):
        pair = tl.load(tile_pairs_ptr + tile * TILE + tl.arange(0, TILE))
        x_row = tl.where(pair >= 0, pair // TOP_K, -1)
        products = _tile_products(x_ptr, x_row, tl.load(tile_expert_ptr + tile), packed_ptr, scales_ptr,
                                  row_scales_ptr, tl.program_id(0), INTER, KIND, ROWS, IN, WARPS, TILE, PTX,
                                  DOT)  # fmt: skip
        both = tl.permute(tl.reshape(products, (WARPS, 2, 8, TILE)), (0, 2, 3, 1))
        gate, up = tl.split(both)  # [WARPS, 8, TILE]
        value = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, (WARPS * 8, TILE))
        column = operand_column(tl.program_id(0) * (WARPS * 8) + tl.arange(0, WARPS * 8))
        at = hidden_ptr + pair.to(tl.int64)[None, :] * INTER + column[:, None]
        tl.store(at, value.to(hidden_ptr.dtype.element_ty), mask=(pair >= 0)[None, :])


@triton.jit
def prefill_down_kernel(
    hidden_ptr, packed_ptr, scales_ptr, row_scales_ptr, tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, out_ptr,
    KIND: tl.constexpr, ROWS: tl.constexpr, IN: tl.constexpr, WARPS: tl.constexpr, TILE: tl.constexpr,
    PTX: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (b, i): 16 * WARPS columns of the experts' outputs for tile i."""
    tile = tl.program_id(1)
    if tile < tl.load(tile_count_ptr):
        pair = tl.load(tile_pairs_ptr + tile * TILE + tl.arange(0, TILE))
        products = _tile_products(hidden_ptr, pair, tl.load(tile_expert_ptr + tile), packed_ptr, scales_ptr,
                                  row_scales_ptr, tl.program_id(0), 0, KIND, ROWS, IN, WARPS, TILE, PTX,
                                  DOT)  # fmt: skip
        column = tl.program_id(0) * (WARPS * 16) + tl.arange(0, WARPS * 16)
        at = out_ptr + pair.to(tl.int64)[None, :] * ROWS + column[:, None]
        tl.store(at, products.to(out_ptr.dtype.element_ty), mask=(pair >= 0)[None, :])


def group_pairs(experts: Tensor, tiles: PairTiles) -> None:
    """experts [T, top_k] int32 into tiles."""
    pairs, count = experts.numel(), tiles.counts.shape[0]
    check("experts", experts, tuple(experts.shape), torch.int32, experts)
    _check_room(tiles, pairs)
    block = 512 if INTERPRETED else SCANNED
    count_kernel[(count,)](experts, tiles.counts, pairs, BLOCK=block, num_warps=4, **FUSION)
    pair_tiles_kernel[(count,)](
        experts, tiles.counts, tiles.tile_expert, tiles.tile_pairs, tiles.tile_count, pairs, EXPERTS=count,
        PADDED=triton.next_power_of_2(count), TILE=tile_size(pairs, count), BLOCK=block, num_warps=4, **FUSION,
    )  # fmt: skip


def prefill_experts(
    x: Tensor, top_k: int, tiles: PairTiles, gate_up: PackedWeight, down: PackedWeight, hidden: Tensor, out: Tensor
) -> None:
    """x [T, H] bf16 in operand order -> out [T * top_k, H] bf16: what each pair's expert makes of its token.

    gate_up [E, 2I, H] with the gate rows first, down [E, H, I]; `hidden` [T * top_k, I] bf16 lies between.
    """
    tokens, size = x.shape
    inter, pairs = down.in_features, tokens * top_k
    check("x", x, (tokens, gate_up.in_features), torch.bfloat16, x)
    check("hidden", hidden, (pairs, inter), torch.bfloat16, x)
    check("out", out, (pairs, size), torch.bfloat16, x)
    check_weight("gate_up", gate_up, x, experts=True)
    check_weight("down", down, x, experts=True)
    if gate_up.rows != 2 * inter or gate_up.out_features != 2 * inter or down.out_features != size:
        raise ValueError(
            f"gate_up must be [experts, {2 * inter}, {size}] for a down of [experts, {size}, {inter}], "
            f"found {[gate_up.out_features, gate_up.in_features]} and {[down.out_features, inter]}."
        )
    if inter % (WARPS * 8) or size % (WARPS * UNIT):
        raise ValueError(
            f"experts must be a multiple of {WARPS * 8} wide in a hidden size that is one of {WARPS * UNIT}, "
            f"found {inter} and {size}."
        )
    _check_room(tiles, pairs)
    experts = tiles.counts.shape[0]
    grid = most_tiles(pairs, experts)
    shape = AMD if torch.version.hip else NVIDIA
    common = {**shape, "TILE": tile_size(pairs, experts), **arithmetic(x.device)}
    lists = (tiles.tile_expert, tiles.tile_pairs, tiles.tile_count)
    prefill_gate_up_kernel[(inter // (WARPS * 8), grid)](
        x, *weight_tensors(gate_up), *lists, hidden, KIND=int(gate_up.kind), ROWS=gate_up.rows, IN=size, TOP_K=top_k,
        **common,
    )  # fmt: skip
    prefill_down_kernel[(size // (WARPS * UNIT), grid)](
        hidden, *weight_tensors(down), *lists, out, KIND=int(down.kind), ROWS=down.rows, IN=inter, **common
    )


def _check_room(tiles: PairTiles, pairs: int) -> None:
    room = tiles.tile_pairs.shape[0] - tiles.counts.shape[0] * TILES[-1]
    if pairs > room:
        raise ValueError(f"{pairs} pairs are to be grouped, room is for {room}.")


NVIDIA: dict[str, Any] = {"WARPS": WARPS, "num_warps": WARPS, "num_stages": 3}
AMD: dict[str, Any] = {**NVIDIA, "num_stages": 2}  # less local memory
