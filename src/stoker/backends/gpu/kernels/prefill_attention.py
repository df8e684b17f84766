# Triton types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Causal attention of a prompt over paged keys, those of earlier chunks included.

One launch norms and rotates queries and keys and writes the pages; the next reads every key as stored, in blocks from
position 0 on. Masked keys add exact zeros and the order follows position alone, so a token's bits depend neither on
the chunk it came in nor on its neighbours.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.kernels.attention import AttentionWeights, Heads, Pages, _stored
from stoker.backends.gpu.kernels.keys import rotated, store_fp8
from stoker.backends.gpu.kernels.launch import INTERPRETED, arithmetic, check, pick
from stoker.backends.gpu.kernels.places import Places, place_of
from stoker.backends.gpu.kernels.products import e4m3
from stoker.backends.network.attention import E4M3_MAX, SMALLEST_SCALE

WRITTEN = 64 if INTERPRETED else 8  # rows of one program that prepares queries and keys
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["pages", "first_head"])
def write_kernel(
    y_ptr, q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, q_norm_ptr, k_norm_ptr, cos_ptr,
    sin_ptr, places_ptr, pages, first_head, WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, Q_WIDTH: tl.constexpr, HALF: tl.constexpr, EPS: tl.constexpr, PAGE: tl.constexpr,
    FP8_PAGES: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr, STORED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (b, h, s): ROWS rows of a sequence, of query head first_head + h or, past the last of those, of a kv
    head."""
    start = tl.program_id(0) * ROWS
    head = first_head + tl.program_id(1)
    _, cached, tokens, first, _ = place_of(places_ptr, tl.program_id(2))
    if start < tokens:
        table_ptr += tl.program_id(2) * pages
        row = start + tl.arange(0, ROWS)[:, None]
        ok = row < tokens
        position = cached + row
        d = tl.arange(0, D)[None, :]
        at = (first + row).to(tl.int64) * WIDTH
        if head < HEADS:
            q = rotated(y_ptr, at + head * Q_WIDTH, ok, d, q_norm_ptr, cos_ptr, sin_ptr, position, HALF, D, EPS, STORED)
            tl.store(q_ptr + ((first + row).to(tl.int64) * HEADS + head) * D + d, q, mask=ok)
        else:
            kv_head = head - HEADS
            at += HEADS * Q_WIDTH + kv_head * D
            k = rotated(y_ptr, at, ok, d, k_norm_ptr, cos_ptr, sin_ptr, position, HALF, D, EPS, STORED)
            v = tl.load(y_ptr + at + KV_HEADS * D + d, mask=ok, other=0.0).to(STORED)
            page = tl.load(table_ptr + position // PAGE, mask=ok, other=0)
            place = (page * PAGE + position % PAGE) * KV_HEADS + kv_head
            if FP8_PAGES:
                store_fp8(keys_ptr, key_scales_ptr, place, d, k.to(tl.float32), ok, KV_HEADS, D, MAX, LEAST)
                store_fp8(values_ptr, value_scales_ptr, place, d, v.to(tl.float32), ok, KV_HEADS, D, MAX, LEAST)
            else:
                tl.store(keys_ptr + place.to(tl.int64) * D + d, k, mask=ok)
                tl.store(values_ptr + place.to(tl.int64) * D + d, v, mask=ok)


@triton.jit(do_not_specialize=["pages"])
def prefill_attention_kernel(
    q_ptr, y_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, out_ptr, places_ptr, pages,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, Q_WIDTH: tl.constexpr,
    SCALE: tl.constexpr, PAGE: tl.constexpr, FP8_PAGES: tl.constexpr, TOKENS: tl.constexpr, ABREAST: tl.constexpr,
    BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (h, t, s): ABREAST heads of one kv head for TOKENS tokens of a sequence; those that see most begin
    first."""
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    _, cached, tokens, first_row, _ = place_of(places_ptr, tl.program_id(2))
    if first < tokens:
        _attend(q_ptr, y_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
                table_ptr + tl.program_id(2) * pages, out_ptr, cached, tokens, first_row, first,
                tl.program_id(0) * ABREAST, WIDTH, HEADS, KV_HEADS, D, Q_WIDTH, SCALE, PAGE, FP8_PAGES, TOKENS,
                ABREAST, BLOCK, DOT)  # fmt: skip


@triton.jit
def _attend(
    q_ptr, y_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, table_ptr, out_ptr, cached, tokens,
    first_row, first, low, WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
    Q_WIDTH: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr, FP8_PAGES: tl.constexpr, TOKENS: tl.constexpr,
    ABREAST: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = TOKENS * ABREAST
    kv_head = low // (HEADS // KV_HEADS)
    m = tl.arange(0, M)
    token = first + m // ABREAST
    head = low + m % ABREAST
    real = (token < tokens)[:, None]
    d = tl.arange(0, D)[None, :]
    # one address for the tile and small distances from it: few registers
    start_row = (first_row + first).to(tl.int64)
    q_ptr += start_row * (HEADS * D)
    out_ptr += start_row * (HEADS * D)
    y_ptr += start_row * WIDTH
    at = (m // ABREAST * HEADS + head)[:, None] * D + d
    q = tl.load(q_ptr + at, mask=real, other=0.0).to(DOT)
    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    stop = cached + tl.minimum(first + TOKENS, tokens)  # keys that the last token of the tile sees
    key = tl.arange(0, BLOCK)
    cells = key[:, None] * (KV_HEADS * D) + d
    for start in range(0, stop, BLOCK):
        first_place = (tl.load(table_ptr + start // PAGE) * PAGE + start % PAGE) * KV_HEADS + kv_head
        place = first_place + key * KV_HEADS
        k = tl.load(keys_ptr + first_place.to(tl.int64) * D + cells)
        v = tl.load(values_ptr + first_place.to(tl.int64) * D + cells)
        if FP8_PAGES:
            k = e4m3(k.to(tl.int32), DOT)
            v = e4m3(v.to(tl.int32), DOT)
        scores = tl.dot(q, tl.trans(k.to(DOT))) * SCALE  # in powers of two
        if FP8_PAGES:
            scores = scores * tl.load(key_scales_ptr + place).to(tl.float32)[None, :]
        scores = tl.where((start + key)[None, :] <= (cached + token)[:, None], scores, float("-inf"))
        after = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - after[:, None])
        fade = tl.exp2(top - after)
        total = total * fade + tl.sum(weights, 1)
        if FP8_PAGES:
            weights = weights * tl.load(value_scales_ptr + place).to(tl.float32)[None, :]
        out = tl.dot(weights.to(DOT), v.to(DOT), out * fade[:, None])
        top = after
    out = out / tl.where(token < tokens, total, 1.0)[:, None]
    # half of the columns at a time: gates and outputs together are more than the registers hold
    left, right = tl.split(tl.permute(tl.reshape(out, (M, 2, D // 2)), (0, 2, 1)))
    half = tl.arange(0, D // 2)[None, :]
    at = (m // ABREAST * HEADS + head)[:, None] * D + half
    gates = (m // ABREAST * WIDTH + head * Q_WIDTH + D)[:, None] + half
    _store_gated(y_ptr + gates, out_ptr + at, left, real, Q_WIDTH > D)
    _store_gated(y_ptr + gates + D // 2, out_ptr + at + D // 2, right, real, Q_WIDTH > D)


@triton.jit
def _store_gated(gate_ptrs, out_ptrs, value, ok, GATED: tl.constexpr):
    if GATED:
        value = value / (1.0 + tl.exp(-tl.load(gate_ptrs, mask=ok, other=0.0)))
    tl.store(out_ptrs, value.to(out_ptrs.dtype.element_ty), mask=ok)


def write_keys(
    y: Tensor, q: Tensor | None, pages: Pages, weights: AttentionWeights, heads: Heads, places: Places
) -> None:
    """From y [T, heads.width] fp32: keys and values to the pages, and queries to q [T, heads, D] if there is one.
    `pages.tables` [S, P] are the sequences'; all tokens have places there and in the rope table."""
    tokens = y.shape[0]
    check("y", y, (tokens, heads.width), torch.float32, y)
    if q is not None:
        check("q", q, (tokens, heads.count, heads.dim), _stored(pages), y)
    _check_pages(pages, heads, places.count, y)
    keys, values, key_scales, value_scales, fp8 = _page_tensors(pages)
    first = 0 if q is not None else heads.count
    math = {key: value for key, value in arithmetic(y.device).items() if key not in ("PTX", "DOT")}
    write_kernel[(triton.cdiv(places.longest, WRITTEN), heads.count + heads.kv_count - first, places.count)](
        y, y if q is None else q, keys, values, key_scales, value_scales, pages.tables, weights.q_norm,
        weights.k_norm, weights.cos, weights.sin, places.numbers, pages.tables.shape[1], first, **_sizes(heads, pages),
        HALF=weights.cos.shape[1], EPS=weights.eps, FP8_PAGES=fp8, MAX=E4M3_MAX, LEAST=SMALLEST_SCALE,
        STORED=tl.float32 if _stored(pages) is torch.float32 else tl.bfloat16, ROWS=WRITTEN, num_warps=4, **math,
    )  # fmt: skip


def prefill_attention(
    y: Tensor, out: Tensor, q: Tensor, pages: Pages, weights: AttentionWeights, heads: Heads, places: Places
) -> None:
    """y [T, heads.width] fp32 of all sequences' tokens -> out [T, heads * D] bf16, gated.

    `pages.tables` [S, P] are those of the sequences; `q` [T, heads, D] bf16 lies between the launches.
    """
    tokens = y.shape[0]
    check("out", out, (tokens, heads.count * heads.dim), torch.bfloat16, y)
    write_keys(y, q, pages, weights, heads, places)
    keys, values, key_scales, value_scales, fp8 = _page_tensors(pages)
    shape = dict(launch_shape(y.device))
    shape["ABREAST"] = min(shape["ABREAST"], heads.group & -heads.group)
    math = {key: value for key, value in arithmetic(y.device).items() if key != "PTX"}
    grid = (heads.count // shape["ABREAST"], triton.cdiv(places.longest, shape["TOKENS"]), places.count)
    prefill_attention_kernel[grid](
        q, y, keys, values, key_scales, value_scales, pages.tables, out, places.numbers, pages.tables.shape[1],
        **_sizes(heads, pages), SCALE=heads.dim**-0.5 * LOG2_E, FP8_PAGES=fp8, **shape, **math,
    )  # fmt: skip


def _sizes(heads: Heads, pages: Pages) -> dict[str, int]:
    return {
        "WIDTH": heads.width, "HEADS": heads.count, "KV_HEADS": heads.kv_count, "D": heads.dim,
        "Q_WIDTH": heads.dim * (2 if heads.gated else 1), "PAGE": pages.keys.shape[1],
    }  # fmt: skip


def _page_tensors(pages: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    if pages.key_scales is None or pages.value_scales is None:
        return pages.keys, pages.values, pages.keys, pages.values, False
    return pages.keys.view(torch.uint8), pages.values.view(torch.uint8), pages.key_scales, pages.value_scales, True


def _check_pages(pages: Pages, heads: Heads, sequences: int, like: Tensor) -> None:
    page = pages.keys.shape[1]
    block = launch_shape(like.device)["BLOCK"]
    if page % block:
        raise ValueError(f"pages must have a multiple of {block} tokens, found {page}.")
    if heads.dim & heads.dim - 1:
        raise ValueError(f"the head dimension must be a power of two, found {heads.dim}.")
    fp8 = pages.key_scales is not None
    for name, tensor in (("keys", pages.keys), ("values", pages.values)):
        dtype = torch.float8_e4m3fn if fp8 else _stored(pages)
        check(name, tensor, (None, page, heads.kv_count, heads.dim), dtype, like)
    check("tables", pages.tables, (None, None), torch.int32, like)
    if len(pages.tables) < sequences:
        raise ValueError(f"{sequences} sequences need a row of tables each, found {len(pages.tables)}.")


HOPPER = {"TOKENS": 64, "ABREAST": 2, "BLOCK": 64, "num_warps": 8, "num_stages": 2}
LITTLE = {"TOKENS": 64, "ABREAST": 1, "BLOCK": 32, "num_warps": 8, "num_stages": 2}  # 99 KB of shared memory
AMD = {"TOKENS": 64, "ABREAST": 1, "BLOCK": 32, "num_warps": 8, "num_stages": 1}
SMALL = {"TOKENS": 32, "ABREAST": 2, "BLOCK": 64}  # the interpreter's


def launch_shape(device: torch.device) -> dict[str, Any]:
    """Keys of a block decide the order of the sum: one choice per kind of device."""
    return SMALL if INTERPRETED else pick(device, HOPPER, LITTLE, AMD)
