# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
"""Attention of a step between its projections: norms and rope, page write, splits over the keys, output gate.

Keys are visited in splits of 256 from position 0. A program has one split of one kv head and two tokens of one
sequence, so that the cost of a split does not grow with the block of drafts and a token's rows have one shape. New
keys are written by every program whose split they lie in, each the same values, before it reads the page: drafts are
attended to as stored. Masked keys add exact zeros. Splits are joined from the first to the last: by the last program
of a head if there are few, else by a launch of its own. A drafter's block may see itself whole, or only the last keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.ops.attention import E4M3_MAX, SMALLEST_SCALE, SPLIT
from stoker.ops.triton.deltanet import Sequences, check_sequences
from stoker.ops.triton.launch import (
    INTERPRETED,
    Workspace,
    arithmetic,
    check,
    check_workspace,
    dependent,
    register_limit,
)
from stoker.ops.triton.products import e4m3, wait_for_inputs

TOKENS = 2  # of one program
JOINED_AT_ONCE = 8  # splits that the last program of a head joins by itself
NVIDIA = {"BLOCK": 64, "num_warps": 4, "num_stages": 1}
AMD = {"BLOCK": 32, "num_warps": 8, "num_stages": 1}  # less local memory
JOIN_COLUMNS, JOIN_AHEAD = 64, 32  # of the separate launch: columns of a program, splits asked for at a time


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
    """Unfinished sums of every split, for T tokens and S splits."""

    sums: Tensor  # [T, heads, S, D] fp32
    highest: Tensor  # [T, heads, S] fp32
    totals: Tensor  # [T, heads, S] fp32

    @classmethod
    def allocate(cls, tokens: int, heads: Heads, splits: int, device: torch.device | str) -> "Partials":
        def empty(*shape: int) -> Tensor:
            return torch.empty(tokens, heads.count, splits, *shape, dtype=torch.float32, device=device)

        return cls(empty(heads.dim), empty(), empty())

    @property
    def splits(self) -> int:
        return self.highest.shape[2]


@triton.jit
def rotated(x_ptr, at, ok, d, norm_ptr, cos_ptr, sin_ptr, position, HALF: tl.constexpr, D: tl.constexpr,
             EPS: tl.constexpr, STORED: tl.constexpr):  # fmt: skip
    """Rows [n, D] of x, normed and rotated, rounded to STORED after each. `at` and `position` are [n, 1]."""
    x = tl.load(x_ptr + at + d, mask=ok, other=0.0)
    other = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    partner = tl.load(x_ptr + at + other, mask=ok, other=0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
    x = (x * inverse * tl.load(norm_ptr + d)).to(STORED).to(tl.float32)
    partner = (partner * inverse * tl.load(norm_ptr + other)).to(STORED).to(tl.float32)
    turns = ok & (d < 2 * HALF)
    angle = position * HALF + d % HALF
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    return (x * cos + tl.where(d < HALF, -partner, partner) * sin).to(STORED)


@triton.jit
def _to_e4m3(x):
    """Codes of the nearest E4M3 values as int32, ties to even; |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 the steps are 2^-9: adding 2^23 steps rounds to whole ones
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(x) < 0.015625, small, normal)
    return tl.where(bits < 0, code | 0x80, code)


@triton.jit
def _store_fp8(pages_ptr, scales_ptr, place, d, value, ok, KV_HEADS: tl.constexpr, D: tl.constexpr,
               MAX: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """As ops.attention.write_pages: a scale per row, values over the scale as stored."""
    step = tl.maximum(tl.max(tl.abs(value), 1)[:, None] / MAX, LEAST).to(scales_ptr.dtype.element_ty)
    scaled = tl.minimum(tl.maximum(value / step.to(tl.float32), -MAX), MAX)
    tl.store(scales_ptr + place, step, mask=ok)
    tl.store(pages_ptr + place.to(tl.int64) * D + d, _to_e4m3(scaled).to(tl.uint8), mask=ok)


@triton.jit
def _join(sums_ptr, highest_ptr, totals_ptr, at, d, ok, lowest, splits, D: tl.constexpr):
    """Splits lowest..splits - 1 of rows `at` [n, 1], in order: [n, columns]."""
    top = tl.load(highest_ptr + at + lowest, mask=ok, other=0.0, cache_modifier=".cg")
    for s in range(lowest + 1, splits):
        top = tl.maximum(top, tl.load(highest_ptr + at + s, mask=ok, other=0.0, cache_modifier=".cg"))
    out = tl.zeros((at.shape[0], d.shape[1]), tl.float32)
    total = tl.zeros((at.shape[0], 1), tl.float32)
    for s in range(lowest, splits):
        weight = tl.exp(tl.load(highest_ptr + at + s, mask=ok, other=0.0, cache_modifier=".cg") - top)
        part = tl.load(sums_ptr + (at + s).to(tl.int64) * D + d, mask=ok, other=0.0, cache_modifier=".cg")
        out = tl.fma(tl.broadcast_to(weight, part.shape), part, out)
        share = tl.load(totals_ptr + at + s, mask=ok, other=0.0, cache_modifier=".cg")
        total = tl.fma(weight, share, total)
    return out / tl.where(ok, total, 1.0)


@triton.jit
def _keys_seen(cached, first, length, TILE: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr):
    """First key that any of the tokens first..first + TILE - 1 sees, and the one after the last."""
    stop = cached + (length if WHOLE else tl.minimum(first + TILE, length))
    return tl.maximum(cached + first + 1 - WINDOW, 0) if WINDOW else stop * 0, stop


@triton.jit(do_not_specialize=["block_rows", "table", "splits_kept"])
def attention_kernel(
    y_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr, q_norm_ptr, k_norm_ptr, cos_ptr,
    sin_ptr, sums_ptr, highest_ptr, totals_ptr, out_ptr, counters_ptr, cached_ptr, lengths_ptr, block_rows,
    splits_kept, table, WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    Q_WIDTH: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    GROUP_PADDED: tl.constexpr, FP8_PAGES: tl.constexpr, JOIN: tl.constexpr, MAX: tl.constexpr,
    LEAST: tl.constexpr, STORED: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (s, b * kv_heads + g, t): split s of kv head g of sequence b for its t-th TILE tokens."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    KEY_AT: tl.constexpr = HEADS * Q_WIDTH
    wait_for_inputs(PDL)
    split = tl.program_id(0)
    sequence = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    first = tl.program_id(2) * TILE
    cached = tl.load(cached_ptr + sequence)
    length = tl.load(lengths_ptr + sequence)
    low, stop = _keys_seen(cached, first, length, TILE, WHOLE, WINDOW)
    begin = split * KEYS
    if (first < length) & (begin < stop) & (begin + KEYS > low):
        d = tl.arange(0, D)[None, :]
        table_ptr = tables_ptr + sequence * table
        # new keys of this split, eight at a time
        fresh_from = tl.maximum(cached, begin)
        fresh_stop = tl.minimum(cached + length, begin + KEYS)
        for start in range(fresh_from, fresh_stop, 8):
            position = (start + tl.arange(0, 8))[:, None]
            ok = position < fresh_stop
            at = (sequence * block_rows + position - cached) * WIDTH + KEY_AT + kv_head * D
            k = rotated(y_ptr, at, ok, d, k_norm_ptr, cos_ptr, sin_ptr, position, HALF, D, EPS, STORED)
            v = tl.load(y_ptr + at + KV_HEADS * D + d, mask=ok, other=0.0).to(STORED)
            page = tl.load(table_ptr + position // PAGE, mask=ok, other=0)
            place = (page * PAGE + position % PAGE) * KV_HEADS + kv_head
            if FP8_PAGES:
                _store_fp8(keys_ptr, key_scales_ptr, place, d, k.to(tl.float32), ok, KV_HEADS, D, MAX, LEAST)
                _store_fp8(values_ptr, value_scales_ptr, place, d, v.to(tl.float32), ok, KV_HEADS, D, MAX, LEAST)
            else:
                tl.store(keys_ptr + place.to(tl.int64) * D + d, k, mask=ok)
                tl.store(values_ptr + place.to(tl.int64) * D + d, v, mask=ok)
        if fresh_from < fresh_stop:
            tl.debug_barrier()
        # queries: TILE tokens of GROUP_PADDED heads each
        m = tl.arange(0, TILE * GROUP_PADDED)[:, None]
        token = first + m // GROUP_PADDED
        head = m % GROUP_PADDED
        real = (token < length) & (head < GROUP)
        row = sequence * block_rows + token
        at = row * WIDTH + (kv_head * GROUP + head) * Q_WIDTH
        q = rotated(y_ptr, at, real, d, q_norm_ptr, cos_ptr, sin_ptr, cached + token, HALF, D, EPS, STORED).to(DOT)
        top = tl.full((TILE * GROUP_PADDED, 1), -1e30, tl.float32)
        total = tl.zeros((TILE * GROUP_PADDED, 1), tl.float32)
        out = tl.zeros((TILE * GROUP_PADDED, D), tl.float32)
        for start in range(begin, tl.minimum(stop, begin + KEYS), BLOCK):
            position = start + tl.arange(0, BLOCK)
            there = position < stop
            page = tl.load(table_ptr + start // PAGE)
            place = (page * PAGE + start % PAGE + tl.arange(0, BLOCK)) * KV_HEADS + kv_head
            cells = place[:, None].to(tl.int64) * D + d
            k = tl.load(keys_ptr + cells, mask=there[:, None], other=0)
            v = tl.load(values_ptr + cells, mask=there[:, None], other=0)
            if FP8_PAGES:
                k = e4m3(k.to(tl.int32), DOT)
                v = e4m3(v.to(tl.int32), DOT)
            scores = tl.dot(q, tl.trans(k.to(DOT))) * SCALE
            if FP8_PAGES:
                scores = scores * tl.load(key_scales_ptr + place, mask=there, other=0.0).to(tl.float32)[None, :]
            seen = position[None, :] < stop if WHOLE else position[None, :] <= cached + token
            if WINDOW:
                seen = seen & (position[None, :] > cached + token - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            after = tl.maximum(top, tl.max(scores, 1)[:, None])
            weights = tl.exp(scores - after)
            fade = tl.exp(top - after)
            total = total * fade + tl.sum(weights, 1)[:, None]
            if FP8_PAGES:
                weights = weights * tl.load(value_scales_ptr + place, mask=there, other=0.0).to(tl.float32)[None, :]
            out = tl.dot(weights.to(DOT), v.to(DOT), out * fade)
            top = after
        at = (row * HEADS + kv_head * GROUP + head) * splits_kept
        tl.store(highest_ptr + at + split, top, mask=real)
        tl.store(totals_ptr + at + split, total, mask=real)
        tl.store(sums_ptr + (at + split).to(tl.int64) * D + d, out, mask=real)
        if JOIN:
            tl.debug_barrier()
            lowest = low // KEYS
            splits = (stop + KEYS - 1) // KEYS
            counter = counters_ptr + tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - lowest - 1:
                tl.debug_barrier()
                value = _join(sums_ptr, highest_ptr, totals_ptr, at, d, real, lowest, splits, D)
                _gate_and_store(y_ptr, out_ptr, value, row, kv_head * GROUP + head, d, real, WIDTH, HEADS, D, Q_WIDTH)
                tl.store(counter, 0)


@triton.jit
def _gate_and_store(y_ptr, out_ptr, value, row, head, d, ok, WIDTH: tl.constexpr, HEADS: tl.constexpr,
                    D: tl.constexpr, Q_WIDTH: tl.constexpr):  # fmt: skip
    if Q_WIDTH > D:
        gate = tl.load(y_ptr + row * WIDTH + head * Q_WIDTH + D + d, mask=ok, other=0.0)
        value = value / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + (row * HEADS + head) * D + d, value.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["block_rows", "splits_kept"])
def join_kernel(
    y_ptr, sums_ptr, highest_ptr, totals_ptr, out_ptr, cached_ptr, lengths_ptr, block_rows, splits_kept,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, Q_WIDTH: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr, WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (r * heads + h, c): the c-th COLUMNS columns of one head of one row; the same sums as `_join`."""
    wait_for_inputs(PDL)
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    sequence = row // block_rows
    token = row % block_rows
    length = tl.load(lengths_ptr + sequence)
    if token < length:
        # as many splits as the tile of the token has: those it does not see weigh nothing
        low, stop = _keys_seen(tl.load(cached_ptr + sequence), token // TILE * TILE, length, TILE, WHOLE, WINDOW)
        lowest = low // KEYS
        splits = (stop + KEYS - 1) // KEYS
        at = tl.program_id(0) * splits_kept
        d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        s = tl.arange(0, 128)
        tops = tl.full((128,), float("-inf"), tl.float32)
        for start in range(lowest, splits, 128):
            found = tl.load(highest_ptr + at + start + s, mask=start + s < splits, other=float("-inf"))
            tops = tl.maximum(tops, found)
        top = tl.max(tops, 0)
        out = tl.zeros((COLUMNS,), tl.float32)
        total = tl.zeros((), tl.float32)
        for start in range(lowest, splits, AHEAD):
            parts = ()
            for ahead in tl.static_range(AHEAD):
                here = tl.minimum(start + ahead, splits - 1)  # past the end: the last once more, with no weight
                parts += (tl.load(sums_ptr + (at + here).to(tl.int64) * D + d),)
            for ahead in tl.static_range(AHEAD):
                here = tl.minimum(start + ahead, splits - 1)
                weight = tl.where(start + ahead < splits, tl.exp(tl.load(highest_ptr + at + here) - top), 0.0)
                out = tl.fma(tl.broadcast_to(weight, (COLUMNS,)), parts[ahead], out)
                total = tl.fma(weight, tl.load(totals_ptr + at + here), total)
        value = (out / total)[None, :]
        _gate_and_store(y_ptr, out_ptr, value, row, head, d[None, :], d[None, :] < D, WIDTH, HEADS, D, Q_WIDTH)


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
    tiles = triton.cdiv(sequences.rows, TOKENS)
    join = partials.splits <= JOINED_AT_ONCE
    if join:
        check_workspace(workspace, 0, sequences.count * heads.kv_count * tiles)
    keys, values, fp8 = pages.keys, pages.values, pages.key_scales is not None
    if fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    shape: dict[str, Any] = {
        "WIDTH": heads.width, "HEADS": heads.count, "D": heads.dim,
        "Q_WIDTH": heads.dim * (2 if heads.gated else 1), "KEYS": SPLIT, "TILE": TOKENS,
        "WHOLE": sight.whole_block, "WINDOW": sight.window,
    }  # fmt: skip
    math = {key: value for key, value in arithmetic(y.device).items() if key != "PTX"}
    attention_kernel[(partials.splits, sequences.count * heads.kv_count, tiles)](
        y, keys, values, pages.key_scales if fp8 else keys, pages.value_scales if fp8 else values, pages.tables,
        weights.q_norm, weights.k_norm, weights.cos, weights.sin, partials.sums, partials.highest, partials.totals,
        out, workspace.counters, sequences.cached, sequences.lengths, sequences.rows, partials.splits,
        pages.tables.shape[1], **shape, KV_HEADS=heads.kv_count,
        HALF=weights.cos.shape[1], EPS=weights.eps, SCALE=heads.dim**-0.5, PAGE=pages.keys.shape[1],
        GROUP_PADDED=max(16, triton.next_power_of_2(heads.group)), FP8_PAGES=fp8,
        JOIN=join, MAX=E4M3_MAX, LEAST=SMALLEST_SCALE,
        STORED=tl.float32 if _stored(pages) is torch.float32 else tl.bfloat16, **launch_shape(), **math,
        **dependent(y.device, pdl),
    )  # fmt: skip
    if not join:
        math.pop("DOT")
        columns = min(JOIN_COLUMNS, heads.dim)
        join_kernel[(tokens * heads.count, heads.dim // columns)](
            y, partials.sums, partials.highest, partials.totals, out, sequences.cached, sequences.lengths,
            sequences.rows, partials.splits, **shape, COLUMNS=columns,
            AHEAD=4 if INTERPRETED else JOIN_AHEAD, num_warps=2, **register_limit(128), **math,
            **dependent(y.device, pdl),
        )  # fmt: skip


def _stored(pages: Pages) -> torch.dtype:
    """The interpreter rounds bf16 towards zero; with fp32 pages it shows the kernel's own error."""
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
    check("out", out, (tokens, heads.count * heads.dim), torch.bfloat16, y)
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
    check("partials.sums", partials.sums, (tokens, heads.count, partials.splits, heads.dim), torch.float32, y)
    for name in ("highest", "totals"):
        check(f"partials.{name}", getattr(partials, name), (tokens, heads.count, partials.splits), torch.float32, y)
    check_sequences(sequences, y)
