# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment,var-annotated"
"""Attention of a step between its projections: norms and rope, page write, sums over the keys, output gate.

Keys are visited in leaves of 64 from position 0. A leaf has its own highest score, sum of weights and weighted values;
leaves are folded in order to splits of 256 keys, splits in order to runs of 16, runs as a tree to the result, by one
formula wherever it is done. So the same bits come from few programs of many splits each, which is best for long
contexts, and from many of one leaf and a part of the columns each, which have little to wait for. A program has those
heads of one token that share a kv head; new keys are written by every program that reads them, each the same values,
and are attended to as stored. Masked keys add exact zeros. Sums are joined by the last leaf of a head if they are few,
else by a launch of its own. A drafter's block may see itself whole, or only the last keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.family import SPLIT
from stoker.backends.gpu.kernels.attention_join import fold, folded, gate_of, join_kernel, keys_seen
from stoker.backends.gpu.kernels.deltanet import Sequences, check_sequences
from stoker.backends.gpu.kernels.keys import rotated, store_fp8
from stoker.backends.gpu.kernels.launch import (
    APART,
    INTERPRETED,
    Workspace,
    arithmetic,
    check,
    check_workspace,
    dependent,
    multiprocessors,
    pick,
)
from stoker.backends.gpu.kernels.products import e4m3, wait_for_inputs
from stoker.backends.network.attention import E4M3_MAX, SMALLEST_SCALE

LEAF_SPLITS, LEAF_CELLS = 16, 128  # splits, and tokens times splits, up to which every leaf has its own program
JOINED_AT_ONCE = 8  # splits up to which the last leaf of a head joins them by itself
PART_COLUMNS = 64  # fewest columns of a program: those of one matrix instruction
FEW_PROGRAMS = 16  # programs of a leaf up to which columns are parted further
LOG2_E = 1.4426950408889634
NVIDIA = {"BLOCK": 64, "num_warps": 4}
AMD = {"BLOCK": 32, "num_warps": 8}  # less local memory
# leaves of whole splits are in shared memory or on their way there, where there is enough of it
STAGED, UNSTAGED = {"PIPELINED": True, "num_stages": 2}, {"PIPELINED": False, "num_stages": 1}
PROGRAMS = 2  # with whole splits that a multiprocessor holds
RUN = 16  # splits that are folded one after the other; runs are joined as a tree
# of the separate launch: columns of a program, runs side by side, slots of each asked for at a time
JOIN = {"COLUMNS": 32, "RUNS": 8, "AHEAD": 16, "num_warps": 4}


@dataclass(frozen=True)
class Heads:
    count: int
    kv_count: int
    dim: int
    gated: bool  # each query head is followed by its gate

    @property
    def group(self) -> int:
        return self.count // self.kv_count

    @property
    def width(self) -> int:
        """Columns of the projections' output: queries and gates head by head, keys, values."""
        return (self.count * (2 if self.gated else 1) + 2 * self.kv_count) * self.dim


@dataclass(frozen=True)
class Sight:
    """Which keys a token sees besides its own: those before it, as a rule."""

    whole_block: bool = False  # those after it in its block too
    window: int = 0  # only so many of the last ones; 0: all


CAUSAL = Sight()


@dataclass(frozen=True)
class AttentionWeights:
    q_norm: Tensor  # [D] fp32, the offset added
    k_norm: Tensor  # [D] fp32
    cos: Tensor  # [positions, rotary / 2] fp32
    sin: Tensor
    eps: float


@dataclass(frozen=True)
class Pages:
    """Keys and values of one layer, [pages, page_size, kv_heads, D] bf16, or FP8 with bf16 scales [pages, page_size,
    kv_heads]; and which pages a sequence has, int32 [B, P]."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True)
class Partials:
    """Unfinished sums for T tokens: of every leaf where these are few, else of every split."""

    sums: Tensor  # [T, heads, S, D] fp32
    highest: Tensor  # [T, heads, S] fp32
    totals: Tensor  # [T, heads, S] fp32
    splits: int

    @classmethod
    def allocate(cls, tokens: int, heads: Heads, splits: int, device: torch.device | str) -> "Partials":
        def empty(*shape: int) -> Tensor:
            cells = tokens, heads.count, slots_of(tokens, splits)
            return torch.empty(*cells, *shape, dtype=torch.float32, device=device)

        return cls(empty(heads.dim), empty(), empty(), splits)

    @property
    def slots(self) -> int:
        return self.highest.shape[2]


def slots_of(tokens: int, splits: int) -> int:
    """Unfinished sums of each token and head."""
    few = splits <= LEAF_SPLITS and tokens * splits <= LEAF_CELLS
    return splits * (SPLIT // launch_shape()["BLOCK"] if few else 1)


@triton.jit
def _in_registers(x):
    """x itself, hidden from the compiler behind an empty instruction, so that an asynchronous product (wgmma) takes it
    from registers. From shared memory that threads had written, some products read wrong values on an H200 (Triton 3.6,
    docs/log/gpu-decode.md); from shared memory that asynchronous copies had filled, none did.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit
def _weights(q, k, scales, seen, SCALE: tl.constexpr, FP8_PAGES: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """Of a leaf's keys k [n, D] as stored, for queries q [m, D]: highest score [m] in powers of two, weights [n, m],
    their sum [m]. Keys are the rows of both products, so 64 of them fill an instruction and the number of queries
    changes nothing in the order of a sum."""
    if FP8_PAGES:
        k = e4m3(k.to(tl.int32), DOT)
    elif PTX:
        k = _in_registers(k)
    scores = tl.dot(k.to(DOT), tl.trans(q)) * SCALE
    if FP8_PAGES:
        scores = scores * scales.to(tl.float32)[:, None]
    scores = tl.where(seen[:, None], scores, float("-inf"))
    top = tl.maximum(tl.max(scores, 0), -1e30)
    weights = tl.exp2(scores - top[None, :])
    return top, weights, tl.sum(weights, 0)


@triton.jit
def _weighted(weights, v, scales, FP8_PAGES: tl.constexpr, COPIED: tl.constexpr, DOT: tl.constexpr, PTX: tl.constexpr):
    """Values v [n, columns] as stored, COPIED to shared memory by hardware: [m, columns]"""
    if FP8_PAGES:
        v = e4m3(v.to(tl.int32), DOT)
        weights = weights * scales.to(tl.float32)[:, None]
    elif PTX and not COPIED:
        v = _in_registers(v)
    return tl.trans(tl.dot(tl.trans(v.to(DOT)), weights.to(DOT)))


@triton.jit
def _rows(pages_ptr, scales_ptr, place, key, columns, there, KV_HEADS: tl.constexpr, D: tl.constexpr,
          FP8_PAGES: tl.constexpr):  # fmt: skip
    """Keys or values of a leaf as stored, and their scales. One address for all and small distances from it: few
    registers."""
    at = (key * (KV_HEADS * D))[:, None] + columns[None, :]
    rows = tl.load(pages_ptr + place.to(tl.int64) * D + at, mask=there[:, None], other=0)
    return rows, tl.load(scales_ptr + place + key * KV_HEADS, mask=there, other=0.0) if FP8_PAGES else 0


@triton.jit
def _ask(pages_ptr, place, key, there, KV_HEADS: tl.constexpr, D: tl.constexpr):
    """Brings a leaf's rows into the cache that all multiprocessors share: no register waits for them."""
    LINE: tl.constexpr = min(1024 // pages_ptr.dtype.element_ty.primitive_bitwidth, D)
    at = tl.where(there, key * (KV_HEADS * D), 0)[:, None] + tl.arange(0, D // LINE)[None, :] * LINE
    address = (pages_ptr + place.to(tl.int64) * D + at).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _put(sums_ptr, highest_ptr, totals_ptr, at, c, top, total, out, ok, D: tl.constexpr):
    tl.store(highest_ptr + at, top, mask=ok)
    tl.store(totals_ptr + at, total, mask=ok)
    tl.store(sums_ptr + at.to(tl.int64)[:, None] * D + c[None, :], out, mask=ok[:, None])


@triton.jit(do_not_specialize=["block_rows", "table", "slots"])
def attention_kernel(
    y_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, q_norm_ptr, k_norm_ptr, cos_ptr,
    sin_ptr, sums_ptr, highest_ptr, totals_ptr, out_ptr, counters_ptr, cached_ptr, lengths_ptr, block_rows,
    slots, table, WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    Q_WIDTH: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
    LEAVES: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_PADDED: tl.constexpr, FP8_PAGES: tl.constexpr, JOIN: tl.constexpr, MAX: tl.constexpr,
    LEAST: tl.constexpr, STORED: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr, DOT: tl.constexpr,
    PTX: tl.constexpr, PIPELINED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t * PARTS + p, s, b * kv_heads + g): kv head g of sequence b for its t-th token and the p-th part of the
    columns; slot s if a slot is one leaf of keys, else the s-th share of the slots, LEAVES leaves each."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KEY_AT: tl.constexpr = HEADS * Q_WIDTH
    KEYS: tl.constexpr = LEAVES * BLOCK
    COLUMNS: tl.constexpr = D // PARTS
    # neighbours read the same keys
    part = tl.program_id(0) % PARTS
    token = tl.program_id(0) // PARTS
    slot = tl.program_id(1)
    sequence = tl.program_id(2) // KV_HEADS
    kv_head = tl.program_id(2) % KV_HEADS
    cached = tl.load(cached_ptr + sequence)
    length = tl.load(lengths_ptr + sequence)
    table_ptr = tables_ptr + sequence * table
    low, stop = keys_seen(cached, token, length, WHOLE, WINDOW)
    lowest = low // KEYS
    last = (stop + KEYS - 1) // KEYS
    if LEAVES == 1:
        begin = slot * KEYS
        end = begin + KEYS
    else:
        share = tl.cdiv(last - lowest, tl.num_programs(1))
        begin = (lowest + slot * share) * KEYS
        end = begin + share * KEYS
    # of one leaf it is a third load that waits for none: that pages are numbers from 0 on is asked for this alone
    page = tl.load(table_ptr + tl.minimum(begin // PAGE, table - 1))
    busy = (token < length) & (begin < stop) & (end > low) & (page >= 0)
    d = tl.arange(0, D)
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.arange(0, BLOCK)
    place = (page * PAGE + begin % PAGE) * KV_HEADS + kv_head
    if PTX and busy:  # keys of earlier steps are there already
        _ask(keys_ptr, place, key, begin + key < cached, KV_HEADS, D)
        _ask(values_ptr, place, key, begin + key < cached, KV_HEADS, D)
        if LEAVES > 1:
            second = begin + BLOCK
            page = tl.load(table_ptr + tl.minimum(second // PAGE, table - 1))
            there = (page * PAGE + second % PAGE) * KV_HEADS + kv_head
            _ask(keys_ptr, there, key, second + key < cached, KV_HEADS, D)
            _ask(values_ptr, there, key, second + key < cached, KV_HEADS, D)
    wait_for_inputs(PDL)
    if busy:
        limit = tl.minimum(stop, end)
        # new keys, eight at a time
        fresh_from = tl.maximum(cached, begin)
        fresh_stop = tl.minimum(cached + length, end)
        for start in range(fresh_from, fresh_stop, 8):
            new_at = (start + tl.arange(0, 8))[:, None]
            ok = new_at < fresh_stop
            at = (sequence * block_rows + new_at - cached) * WIDTH + KEY_AT + kv_head * D
            new_v = tl.load(y_ptr + at + KV_HEADS * D + d[None, :], mask=ok, other=0.0).to(STORED)
            new_page = tl.load(table_ptr + new_at // PAGE, mask=ok, other=0)
            new_k = rotated(
                y_ptr, at, ok, d[None, :], k_norm_ptr, cos_ptr, sin_ptr, new_at, HALF, D, EPS, STORED
            )  # fmt: skip
            to = (new_page * PAGE + new_at % PAGE) * KV_HEADS + kv_head
            if FP8_PAGES:
                store_fp8(
                    keys_ptr, key_scales_ptr, to, d[None, :], new_k.to(tl.float32), ok, KV_HEADS, D, MAX, LEAST
                )  # fmt: skip
                store_fp8(
                    values_ptr, value_scales_ptr, to, d[None, :], new_v.to(tl.float32), ok, KV_HEADS, D, MAX, LEAST
                )  # fmt: skip
            else:
                tl.store(keys_ptr + to.to(tl.int64) * D + d[None, :], new_k, mask=ok)
                tl.store(values_ptr + to.to(tl.int64) * D + d[None, :], new_v, mask=ok)
        if fresh_from < fresh_stop:
            tl.debug_barrier()
        # queries: those heads of the token that share a kv head
        m = tl.arange(0, GROUP_PADDED)
        head = kv_head * GROUP + m
        real = m < GROUP
        row = m * 0 + sequence * block_rows + token
        position = (m * 0 + cached + token)[:, None]
        at = (row * WIDTH + head * Q_WIDTH)[:, None]
        q = rotated(
            y_ptr, at, real[:, None], d[None, :], q_norm_ptr, cos_ptr, sin_ptr, position, HALF, D, EPS, STORED
        ).to(DOT)  # fmt: skip
        at = (row * HEADS + head) * slots
        if LEAVES == 1:
            there = begin + key < limit
            k, k_scales = _rows(keys_ptr, key_scales_ptr, place, key, d, there, KV_HEADS, D, FP8_PAGES)
            v, v_scales = _rows(values_ptr, value_scales_ptr, place, key, c, there, KV_HEADS, D, FP8_PAGES)
            seen = there & (begin + key >= low)
            top, weights, total = _weights(q, k, k_scales, seen, SCALE, FP8_PAGES, DOT, PTX)
            out = _weighted(weights, v, v_scales, FP8_PAGES, False, DOT, PTX)
            _put(sums_ptr, highest_ptr, totals_ptr, at + slot, c, top, total, out, real, D)
        else:
            top = tl.full((GROUP_PADDED,), -1e30, tl.float32)
            total = tl.zeros((GROUP_PADDED,), tl.float32)
            out = tl.zeros((GROUP_PADDED, COLUMNS), tl.float32)
            if not PIPELINED:
                page = tl.load(table_ptr + tl.minimum(begin + BLOCK, stop - 1) // PAGE)  # of the next leaf
            for start in range(begin, limit, BLOCK):
                after, there = start + BLOCK, start + key < limit
                if PIPELINED:
                    place = (tl.load(table_ptr + start // PAGE) * PAGE + start % PAGE) * KV_HEADS + kv_head
                k, k_scales = _rows(keys_ptr, key_scales_ptr, place, key, d, there, KV_HEADS, D, FP8_PAGES)
                v, v_scales = _rows(values_ptr, value_scales_ptr, place, key, c, there, KV_HEADS, D, FP8_PAGES)
                if not PIPELINED:
                    place = (page * PAGE + after % PAGE) * KV_HEADS + kv_head
                    page = tl.load(table_ptr + tl.minimum(after + BLOCK, stop - 1) // PAGE)
                seen = there & (start + key >= low)
                leaf_top, weights, leaf_total = _weights(q, k, k_scales, seen, SCALE, FP8_PAGES, DOT, PTX)
                leaf_out = _weighted(weights, v, v_scales, FP8_PAGES, PIPELINED, DOT, PTX)
                top = tl.where(start % KEYS == 0, -1e30, top)  # a split begins: what was before weighs nothing
                top, total, out = folded(top, total, out, leaf_top, leaf_total, leaf_out)
                if (after % KEYS == 0) | (after >= limit):
                    _put(sums_ptr, highest_ptr, totals_ptr, at + start // KEYS, c, top, total, out, real, D)
        if JOIN:
            tl.debug_barrier()
            counter = counters_ptr + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * APART
            if tl.atomic_add(counter, 1, sem="acq_rel") == last - lowest - 1:
                tl.debug_barrier()
                gate = gate_of(y_ptr, row, head, c, real, WIDTH, D, Q_WIDTH)
                begin = lowest // FOLD * FOLD
                top, total, out = fold(sums_ptr, highest_ptr, totals_ptr, at, c, real, begin + row * 0, last - begin,
                                        lowest, last, D, FOLD, FOLD)  # fmt: skip
                out = out / tl.where(real, total, 1.0)[:, None] * gate
                to = ((row * HEADS + head) * D)[:, None] + c[None, :]
                tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=real[:, None])
                tl.store(counter, 0)


def attention(
    y: Tensor,
    out: Tensor,
    pages: Pages,
    weights: AttentionWeights,
    heads: Heads,
    sequences: Sequences,
    partials: Partials,
    workspace: Workspace,
    pdl: bool = False,
    sight: Sight = CAUSAL,
) -> None:
    """y [T, heads.width] fp32 from the projections -> out [T, heads * D] bf16, gated; keys and values go to pages."""
    tokens = sequences.count * sequences.rows
    _check(y, out, pages, weights, heads, sequences, partials, tokens)
    groups, block = sequences.count * heads.kv_count, launch_shape()["BLOCK"]
    fold = partials.slots // partials.splits  # slots that make a split
    leaves = SPLIT // block // fold
    fp8 = pages.key_scales is not None  # whose values go through registers anyway
    stages = UNSTAGED if leaves == 1 or fp8 else pick(y.device, STAGED, UNSTAGED, UNSTAGED)
    programs, parts = groups * sequences.rows, 1
    while leaves == 1 and 2 * parts * PART_COLUMNS <= heads.dim and 2 * parts * programs <= FEW_PROGRAMS:
        parts *= 2
    shares = partials.slots
    if leaves > 1:
        shares = max(1, min(shares, PROGRAMS * multiprocessors(y.device) // programs))
    join = leaves == 1 and partials.splits <= JOINED_AT_ONCE
    if join:
        check_workspace(workspace, 0, programs * parts)
    keys, values = pages.keys, pages.values
    if fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    shape: dict[str, Any] = {
        "WIDTH": heads.width, "HEADS": heads.count, "D": heads.dim,
        "Q_WIDTH": heads.dim * (2 if heads.gated else 1), "FOLD": fold,
        "WHOLE": sight.whole_block, "WINDOW": sight.window,
    }  # fmt: skip
    math = arithmetic(y.device)
    attention_kernel[(sequences.rows * parts, shares, groups)](
        y, keys, values, pages.key_scales if fp8 else keys, pages.value_scales if fp8 else values, pages.tables,
        weights.q_norm, weights.k_norm, weights.cos, weights.sin, partials.sums, partials.highest, partials.totals,
        out, workspace.counters, sequences.cached, sequences.lengths, sequences.rows, partials.slots,
        pages.tables.shape[1], **shape, KV_HEADS=heads.kv_count, LEAVES=leaves, PARTS=parts,
        HALF=weights.cos.shape[1], EPS=weights.eps, SCALE=heads.dim**-0.5 * LOG2_E, PAGE=pages.keys.shape[1],
        GROUP_PADDED=max(16, triton.next_power_of_2(heads.group)), FP8_PAGES=fp8,
        JOIN=join, MAX=E4M3_MAX, LEAST=SMALLEST_SCALE,
        STORED=tl.float32 if _stored(pages) is torch.float32 else tl.bfloat16, **launch_shape(), **stages, **math,
        **dependent(y.device, pdl),
    )  # fmt: skip
    if not join:
        fusion = {key: value for key, value in math.items() if key not in ("DOT", "PTX")}
        settings = (
            JOIN
            | ({"RUNS": 1, "COLUMNS": 64} if partials.splits <= RUN else {})
            | ({"AHEAD": fold} if INTERPRETED else {})
        )
        settings["COLUMNS"] = min(settings["COLUMNS"], heads.dim)
        join_kernel[(tokens * heads.count, heads.dim // settings["COLUMNS"])](
            y, partials.sums, partials.highest, partials.totals, out, sequences.cached, sequences.lengths,
            sequences.rows, partials.slots, **shape, KEYS=leaves * block, RUN=RUN, **settings, **fusion,
            **dependent(y.device, pdl),
        )  # fmt: skip


def _stored(pages: Pages) -> torch.dtype:
    """The interpreter rounds bf16 towards zero; with fp32 pages and results it shows the kernel's own error."""
    return torch.float32 if INTERPRETED and pages.keys.dtype is torch.float32 else torch.bfloat16


def launch_shape() -> dict[str, int]:
    """Keys of a block decide the order of the sum: one choice per kind of device."""
    return AMD if torch.version.hip else NVIDIA


def _check(
    y: Tensor,
    out: Tensor,
    pages: Pages,
    weights: AttentionWeights,
    heads: Heads,
    sequences: Sequences,
    partials: Partials,
    tokens: int,
) -> None:
    check("y", y, (tokens, heads.width), torch.float32, y)
    check("out", out, (tokens, heads.count * heads.dim), _stored(pages), y)
    fp8 = pages.key_scales is not None
    dtype = torch.float8_e4m3fn if fp8 else _stored(pages)
    page = pages.keys.shape[1]
    if SPLIT % page or page % launch_shape()["BLOCK"]:
        raise ValueError(f"pages must have {launch_shape()['BLOCK']} to {SPLIT} tokens in powers of two, found {page}.")
    if heads.dim & heads.dim - 1:
        raise ValueError(f"the head dimension must be a power of two, found {heads.dim}.")
    for name, tensor in (("keys", pages.keys), ("values", pages.values)):
        check(name, tensor, (None, page, heads.kv_count, heads.dim), dtype, y)
    for name, scales in (("key_scales", pages.key_scales), ("value_scales", pages.value_scales)):
        if (scales is not None) != fp8:
            raise ValueError("key_scales and value_scales belong together: give both or none.")
        if scales is not None:
            check(name, scales, (None, page, heads.kv_count), torch.bfloat16, y)
    check("tables", pages.tables, (sequences.count, None), torch.int32, y)
    if partials.splits * SPLIT > pages.tables.shape[1] * page + SPLIT - 1:
        raise ValueError(
            f"{partials.splits} splits of {SPLIT} keys need a table of {partials.splits * SPLIT // page} pages, "
            f"found {pages.tables.shape[1]}."
        )
    check("q_norm", weights.q_norm, (heads.dim,), torch.float32, y)
    check("k_norm", weights.k_norm, (heads.dim,), torch.float32, y)
    check("cos", weights.cos, (None, None), torch.float32, y)
    check("sin", weights.sin, tuple(weights.cos.shape), torch.float32, y)
    check("partials.sums", partials.sums, (tokens, heads.count, partials.slots, heads.dim), torch.float32, y)
    for name in ("highest", "totals"):
        check(f"partials.{name}", getattr(partials, name), (tokens, heads.count, partials.slots), torch.float32, y)
    check_sequences(sequences, y)
