# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
"""The second norm of a layer, the router, top-k and the grouping of (token, expert) pairs into tiles: one launch.

Programs share the router's product; the one that comes last chooses. Pairs of one expert form tiles of eight columns,
so that each chosen expert is read once for up to eight tokens. More than 16 tokens are grouped by a second launch. Rows
that pad a batch choose no expert, so that none is read for them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.deltanet import Sequences
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
from stoker.backends.gpu.kernels.products import token_rows, unit_products, wait_for_inputs
from stoker.backends.gpu.packed import GROUP, UNIT, Kind, PackedWeight

TILE = 8  # columns: the narrowest matrix instruction; 16 tokens bring 1.3 pairs to an expert they choose
GROUPED_AT_ONCE = 4  # tokens whose pairs the last program groups by itself; of 12 it took 50 us, a launch takes 3


@dataclass(frozen=True)
class Routing:
    """What `route` decides for T tokens, P = T * top_k pairs; pair p is rank p % top_k of token p // top_k."""

    inverse_rms: Tensor  # [T] fp32, of the stream
    experts: Tensor  # [T, top_k] int32, by falling probability; -1 of rows that pad a batch
    weights: Tensor  # [T, top_k] fp32
    shared: Tensor  # [T] fp32: the shared expert's gate
    tile_expert: Tensor  # [P] int32, -1: an empty tile
    tile_pairs: Tensor  # [P, 8] int32, -1: an unused column
    # [1] int32: tiles that are not empty. As many as distinct experts while none has more than eight pairs, which up to
    # eight tokens cannot be; beyond them never fewer
    tile_count: Tensor

    @classmethod
    def allocate(
        cls, tokens: int, top_k: int, device: torch.device | str, tile_count: Tensor | None = None
    ) -> "Routing":
        """`tile_count` [1] int32 where the counts of several layers are read together."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        fp32, pairs = torch.float32, tokens * top_k
        return cls(
            inverse_rms=empty(tokens, dtype=fp32),
            experts=empty(tokens, top_k),
            weights=empty(tokens, top_k, dtype=fp32),
            shared=empty(tokens, dtype=fp32),
            tile_expert=empty(pairs),
            tile_pairs=empty(pairs, TILE),
            tile_count=empty(1) if tile_count is None else tile_count,
        )

    @property
    def tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]


@triton.jit
def _choose(partial_ptr, rms_ptr, experts_ptr, weights_ptr, shared_ptr, lengths_ptr, first, tokens, block_rows,
            EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
            SHARED: tl.constexpr, RENORMALIZE: tl.constexpr, PADS: tl.constexpr):  # fmt: skip
    """Experts of tokens first..first + 7: always eight rows, so that every sum has one shape."""
    token = first + tl.arange(0, 8)
    ok = token < tokens
    expert = tl.arange(0, PADDED)[None, :]
    inverse = tl.load(rms_ptr + token, mask=ok, other=0.0, cache_modifier=".cg")
    logits = tl.zeros((8, PADDED), tl.float32)
    gate = tl.zeros((8,), tl.float32)
    for p in tl.static_range(SPLIT):
        at = partial_ptr + (p * tokens + token) * ROWS
        logits += tl.load(at[:, None] + expert, mask=ok[:, None] & (expert < EXPERTS), other=0.0, cache_modifier=".cg")
        if SHARED:
            gate += tl.load(at + EXPERTS, mask=ok, other=0.0, cache_modifier=".cg")
    if SHARED:
        tl.store(shared_ptr + token, 1.0 / (1.0 + tl.exp(-gate * inverse)), mask=ok)
    left = tl.where(expert < EXPERTS, logits * inverse[:, None], float("-inf"))
    highest = tl.max(left, 1)
    total = tl.zeros((8,), tl.float32)
    if not RENORMALIZE:
        total = tl.sum(tl.exp(left - highest[:, None]), 1)
    PLACES: tl.constexpr = triton.next_power_of_2(TOP_K)
    place = tl.arange(0, PLACES)[None, :]
    chosen = tl.zeros((8, PLACES), tl.int32)
    likelihoods = tl.zeros((8, PLACES), tl.float32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        index = tl.min(tl.where(left == best[:, None], expert, PADDED), 1)
        index = tl.minimum(index, EXPERTS - 1)  # a row of NaN has no best; what follows must stay in bounds
        left = tl.where(expert == index[:, None], float("-inf"), left)
        likelihood = tl.exp(best - highest)
        if RENORMALIZE:
            total += likelihood
        chosen = tl.where(place == rank, index[:, None], chosen)
        likelihoods = tl.where(place == rank, likelihood[:, None], likelihoods)
    real = ok
    if PADS:
        real = token % block_rows < tl.load(lengths_ptr + token // block_rows, mask=ok, other=0)
    at = token[:, None] * TOP_K + place
    there = ok[:, None] & (place < TOP_K)
    tl.store(experts_ptr + at, tl.where(real[:, None], chosen, -1), mask=there)
    tl.store(weights_ptr + at, tl.where(real[:, None], likelihoods / total[:, None], 0.0), mask=there)


@triton.jit
def _group(experts_ptr, tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, pairs, PADDED: tl.constexpr):
    """Tile i holds pair i and the 7 after it if pair i is the 1st, 9th, .. of its expert, else nothing."""
    p = tl.arange(0, PADDED)[None, :]
    theirs = tl.load(experts_ptr + p, mask=p < pairs, other=-1, cache_modifier=".cg")
    tiles = tl.zeros((16,), tl.int32)
    for first in range(0, pairs, 16):  # a few rows at a time: a program's registers hold no more
        i = first + tl.arange(0, 16)
        ok = i < pairs
        mine = tl.load(experts_ptr + i, mask=ok, other=-2, cache_modifier=".cg")
        same = mine[:, None] == theirs
        before = tl.sum((same & (p < i[:, None])).to(tl.int32), 1)  # pairs of the same expert before this one
        start = (before % 8 == 0) & ok & (mine >= 0)
        tiles += start.to(tl.int32)
        tl.store(tile_expert_ptr + i, tl.where(start, mine, -1), mask=ok)
        # of each pair of the same expert, how many lie from pair i on: its column if i starts a tile
        later = same & (p >= i[:, None])
        column = tl.where(later & start[:, None], tl.cumsum(later.to(tl.int32), 1) - 1, -1)
        for c in tl.static_range(8):
            tl.store(tile_pairs_ptr + i * 8 + c, tl.max(tl.where(column == c, p, -1), 1), mask=ok)
    tl.store(tile_count_ptr, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["tokens", "block_rows"])
def route_kernel(
    x_ptr, scaled_ptr, packed_ptr, scales_ptr, row_scales_ptr, rms_ptr, experts_ptr, weights_ptr, shared_ptr,
    tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, partial_ptr, counters_ptr, lengths_ptr, tokens, block_rows,
    EXPERTS: tl.constexpr, PADS: tl.constexpr,
    PADDED: tl.constexpr, TOP_K: tl.constexpr, PAIRS_PADDED: tl.constexpr, SHARED: tl.constexpr,
    RENORMALIZE: tl.constexpr, EPS: tl.constexpr, HIDDEN_PADDED: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, IN: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, CHUNK: tl.constexpr, PTX: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, t, s): the b-th 16 experts, the t-th COLUMNS tokens, the s-th part of the inputs, or after the last
    part norms of rows. PAIRS_PADDED is 1 if pairs need no grouping here: one token, or more than GROUPED_AT_ONCE."""
    ALL_GROUPS: tl.constexpr = IN // 128
    GROUPS: tl.constexpr = ALL_GROUPS // (SLICES * SPLIT)
    UNITS: tl.constexpr = ROWS // 16
    unit = tl.program_id(0)
    part = tl.program_id(2)
    first = tl.program_id(1) * COLUMNS
    if part < SPLIT:
        token, slice = token_rows(SLICES, COLUMNS)
        token += first
        x_ptrs = scaled_ptr + token * IN + (part * SLICES + slice) * (GROUPS * 128) + tl.arange(0, 32)[None, :]
        products = unit_products(packed_ptr, scales_ptr, row_scales_ptr, unit, 1, part, x_ptrs, token < tokens, KIND,
                                 ROWS, 1, SLICES, GROUPS, ALL_GROUPS, COLUMNS, AHEAD, CHUNK, PTX, DOT,
                                 PDL)  # fmt: skip
        column = first + tl.arange(0, COLUMNS)[None, :]
        at = partial_ptr + (part * tokens + column) * ROWS + unit * 16 + tl.arange(0, 16)[:, None]
        tl.store(at, products[0], mask=column < tokens)
    else:  # norms of some of the rows, one at a time
        wait_for_inputs(PDL)
        for row in range(unit, COLUMNS, UNITS):
            if first + row < tokens:
                c = tl.arange(0, HIDDEN_PADDED)
                x = tl.load(x_ptr + (first + row) * IN + c, mask=c < IN, other=0.0).to(tl.float32)
                tl.store(rms_ptr + first + row, 1.0 / tl.sqrt(tl.sum(x * x, 0) / IN + EPS))
    tl.debug_barrier()
    counter = counters_ptr + tl.program_id(1) * APART
    if tl.atomic_add(counter, 1, sem="acq_rel") == UNITS * (SPLIT + 1) - 1:
        tl.debug_barrier()
        for start in tl.static_range(0, COLUMNS, 8):
            _choose(partial_ptr, rms_ptr, experts_ptr, weights_ptr, shared_ptr, lengths_ptr, first + start, tokens,
                    block_rows, EXPERTS, PADDED, TOP_K, ROWS, SPLIT, SHARED, RENORMALIZE, PADS)  # fmt: skip
        if PAIRS_PADDED > 1:
            tl.debug_barrier()
            _group(experts_ptr, tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, tokens * TOP_K, PAIRS_PADDED)
        elif tl.program_id(1) == 0:
            tl.store(tile_count_ptr, tl.where(tokens == 1, TOP_K, 0))  # else counted by tiles_kernel
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["pairs"])
def tiles_kernel(experts_ptr, tile_expert_ptr, tile_pairs_ptr, tile_count_ptr, pairs, PADDED: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """Program i: tile i, as `_group` makes them, and adds it to the count, which must be 0 before."""
    wait_for_inputs(PDL)
    i = tl.program_id(0)
    p = tl.arange(0, PADDED)
    expert = tl.load(experts_ptr + i)
    same = tl.load(experts_ptr + p, mask=p < pairs, other=-1) == expert
    before = tl.sum((same & (p < i)).to(tl.int32), 0)
    first = (before % 8 == 0) & (expert >= 0)
    column = tl.cumsum(same.to(tl.int32), 0) - 1 - before  # of each pair of this expert, counted from pair i
    c = tl.arange(0, 8)
    mine = same[None, :] & (column[None, :] == c[:, None]) & first
    tl.store(tile_pairs_ptr + i * 8 + c, tl.max(tl.where(mine, p[None, :], -1), 1))
    tl.store(tile_expert_ptr + i, tl.where(first, expert, -1))
    tl.atomic_add(tile_count_ptr, first.to(tl.int32))


def route(
    x: Tensor,
    scaled: Tensor,
    weight: PackedWeight,
    routing: Routing,
    workspace: Workspace,
    *,
    eps: float,
    renormalize: bool,
    shared: bool,
    pdl: bool = False,
    sequences: Sequences | None = None,
) -> None:
    """From the stream x [T, H] bf16 and `scaled`, x times the norm's weight, into `routing`.

    weight [E, H], with the shared expert's gate as row E if `shared`. Rows past the lengths of `sequences` choose none.
    """
    hidden, top_k = weight.in_features, routing.top_k
    check_tokens(x, hidden)
    tokens = x.shape[0]
    check("scaled", scaled, (tokens, hidden), torch.bfloat16, x)
    check_weight("weight", weight, x)
    _check_routing(routing, tokens, x)
    experts = weight.out_features - int(shared)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be 1 to {experts}, found {top_k}.")
    shape = launch_shape(tokens, hidden, weight.kind)
    blocks = triton.cdiv(tokens, shape["COLUMNS"])
    check_workspace(workspace, shape["SPLIT"] * tokens * weight.rows, blocks)
    at_once = 1 < tokens <= GROUPED_AT_ONCE
    pads = sequences is not None and tokens > 1
    if sequences is not None:
        check("sequences.lengths", sequences.lengths, (tokens // sequences.rows,), torch.int32, x)
    route_kernel[(weight.rows // UNIT, blocks, shape["SPLIT"] + 1)](
        x, scaled, *weight_tensors(weight), routing.inverse_rms, routing.experts, routing.weights, routing.shared,
        routing.tile_expert, routing.tile_pairs, routing.tile_count, workspace.partial, workspace.counters,
        sequences.lengths if sequences else routing.experts, tokens, sequences.rows if sequences else 1,
        EXPERTS=experts, PADS=pads, PADDED=triton.next_power_of_2(experts), TOP_K=top_k,
        PAIRS_PADDED=triton.next_power_of_2(tokens * top_k) if at_once else 1, SHARED=shared, RENORMALIZE=renormalize,
        EPS=eps, HIDDEN_PADDED=triton.next_power_of_2(hidden), **weight_shape(weight), **shape,
        **arithmetic(x.device), **dependent(x.device, pdl),
    )  # fmt: skip
    if tokens > GROUPED_AT_ONCE:
        group_pairs(routing, pdl)


def group_pairs(routing: Routing, pdl: bool = False) -> None:
    """Fills in the tiles for the experts chosen; `tile_count` must be 0 before."""
    pairs = routing.experts.numel()
    padded = triton.next_power_of_2(pairs)
    tiles_kernel[(pairs,)](
        routing.experts, routing.tile_expert, routing.tile_pairs, routing.tile_count, pairs, PADDED=padded,
        num_warps=1 if padded <= 256 else 4, enable_fp_fusion=False, **dependent(routing.experts.device, pdl),
    )  # fmt: skip


def launch_shape(tokens: int, hidden: int, kind: Kind) -> dict[str, Any]:
    """Slices and split follow the router's inputs alone. Few rows, so the inputs are dealt to many programs."""
    groups = hidden // GROUP
    slices = slice_count(groups)
    split = next(s for s in (6, 4, 3, 2, 1) if groups % (s * slices) == 0)
    return {
        "SLICES": slices,
        "SPLIT": split,
        "COLUMNS": 8 if tokens <= 8 else 16,
        "CHUNK": chunk_size(groups // (slices * split)),
        "AHEAD": 1,
        "num_warps": slices,
        **register_limit(128 if kind.tiles > 1 else 96),
    }


def _check_routing(routing: Routing, tokens: int, like: Tensor) -> None:
    top_k = routing.top_k
    pairs = tokens * top_k
    shapes: dict[str, tuple[tuple[int | None, ...], torch.dtype]] = {
        "inverse_rms": ((tokens,), torch.float32),
        "experts": ((tokens, top_k), torch.int32),
        "weights": ((tokens, top_k), torch.float32),
        "shared": ((tokens,), torch.float32),
        "tile_expert": ((pairs,), torch.int32),
        "tile_pairs": ((pairs, TILE), torch.int32),
        "tile_count": ((1,), torch.int32),
    }
    for name, (shape, dtype) in shapes.items():
        check(f"routing.{name}", getattr(routing, name), shape, dtype, like)
