# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention of steps as compiled kernels: norm and rope of queries and keys, then a pass over the visible pages.

Each row visits its pages from the first visible one on, with a running maximum. Nothing depends on the other rows or on
what is cached behind a row's own keys.
"""

import math
from types import NotImplementedType

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from stoker.backends.cpu.kernels.compiled import (
    bf16s,
    compiled,
    dot,
    exp,
    floats,
    fma,
    highest,
    longs,
    narrow,
    octets,
    sigmoid,
    total,
    widen,
)
from stoker.backends.cpu.kernels.strips import BLOCK, STRIP, add_strip, sixteen_dots, widen_many
from stoker.backends.cpu.kernels.team import arguments, call, entry, ticket
from stoker.backends.cpu.ops.attention import QueryTiles
from stoker.backends.family import STEP_TILE

E4M3_SHIFT = np.float32(2.0**120)  # the exponent bias of fp32 less that of FP8
UNSEEN = np.float32(-1e30)


@compiled
def _norm_and_rope(row, scale, eps, cos, sin, out):
    """out = bf16 of the rotated row / rms(row) * scale."""
    size, half = scale.shape[0], cos.shape[0]
    wide = np.empty(size, np.float32)
    for i in range(size):
        wide[i] = widen(row[i])
    factor = np.float32(1) / np.float32(math.sqrt(dot(wide, wide) / np.float32(size) + eps))
    for i in range(size):
        wide[i] = widen(narrow(wide[i] * factor * scale[i]))
    for i in range(half):
        a, b = wide[i], wide[half + i]
        wide[i] = a * cos[i] - b * sin[i]
        wide[half + i] = b * cos[i] + a * sin[i]
    for i in range(size):
        out[i] = narrow(wide[i])


@compiled
def _heads(q, q_stride, k, k_stride, scale, eps, cos, sin, half, heads, kv_heads, dim, step, tokens, q_out, k_out):
    """`step` is the distance of queries in a row: they may alternate with gates."""
    scales = floats(scale, (heads + kv_heads, dim))
    cosines, sines = floats(cos, (tokens, half)), floats(sin, (tokens, half))
    queries, keys = bf16s(q_out, (tokens, heads, dim)), bf16s(k_out, (tokens, kv_heads, dim))
    for t in range(tokens):
        for h in range(heads):
            row = bf16s(q + 2 * (t * q_stride + h * step), (dim,))
            _norm_and_rope(row, scales[h], np.float32(eps), cosines[t], sines[t], queries[t, h])
        for h in range(kv_heads):
            row = bf16s(k + 2 * (t * k_stride + h * dim), (dim,))
            _norm_and_rope(row, scales[heads + h], np.float32(eps), cosines[t], sines[t], keys[t, h])


@compiled
def _read(pages, start, scale, out):
    """Numbers from `start` on: bf16, or FP8 where there is a scale."""
    if scale == 0:
        widen_many(pages + 2 * start, out.shape[0], out.ctypes.data)
        return
    codes, step = octets(pages + start, (out.shape[0],)), widen(bf16s(scale, (1,))[0])
    for i in range(out.shape[0]):
        code = np.uint32(codes[i])
        bits = ((code & np.uint32(0x80)) << np.uint32(24)) | ((code & np.uint32(0x7F)) << np.uint32(20))
        out[i] = np.uint32(bits).view(np.float32) * E4M3_SHIFT * step


@compiled
def _read_strip(pages, base, low, high, head, kv_heads, scales, out):
    """Keys or values low .. high of sixteen -> out [parts, 16, dim / parts], zeros outside."""
    parts, _, size = out.shape
    for key in range(STRIP):
        place = (base + key) * kv_heads + head
        for part in range(parts):
            if low <= key <= high:
                _read(pages, (place * parts + part) * size, scales and scales + 2 * place, out[part, key])
            else:
                out[part, key] = np.float32(0)


@compiled
def _scale(row, factor):
    for i in range(row.shape[0]):
        row[i] *= factor


@compiled
def _gate(row, gates):
    """row *= sigmoid(gates), in bf16."""
    for i in range(row.shape[0]):
        row[i] = narrow(widen(row[i]) * sigmoid(widen(gates[i])))


@compiled
def _weigh(scores, low, high, top, sum):
    """Scores of a page become weights, zero outside low .. high; how much what came before shrinks."""
    if high < low:
        scores[:] = np.float32(0)
        return np.float32(1)
    best = max(top[0], highest(scores[low : high + 1]))
    for key in range(scores.shape[0]):
        scores[key] = exp(scores[key] - best)
    scores[:low] = np.float32(0)
    scores[high + 1 :] = np.float32(0)
    decay = exp(top[0] - best)
    top[0], sum[0] = best, fma(sum[0], decay, total(scores))
    return decay


@entry
def _attend(data):
    """Every tile of queries, with each head of keys, is an item: a page is read once for all queries of a tile."""
    (
        q, gate, gate_stride, gate_step, k_pages, v_pages, k_scales, v_scales, page_size, rows_in, first_in, last_in,
        tables_in, count, width, table_size, heads, kv_heads, dim, tokens, out,
    ) = to_fixed_tuple(arguments(data, 21), 21)  # fmt: skip
    group, blocks = heads // kv_heads, dim // BLOCK
    queries, results = bf16s(q, (tokens, heads, dim)), bf16s(out, (tokens, heads, dim))
    rows, first, last = longs(rows_in, (count, width)), longs(first_in, (count, width)), longs(last_in, (count, width))
    tables = longs(tables_in, (count, table_size))
    root = np.float32(1) / np.float32(math.sqrt(dim))
    most = width * group
    wide, keys = np.empty((most, dim), np.float32), np.empty((1, STRIP, dim), np.float32)
    values, sums = np.empty((blocks, STRIP, BLOCK), np.float32), np.empty((blocks, most, BLOCK), np.float32)
    weights = np.empty((most, page_size), np.float32)
    top, share = np.empty(most, np.float32), np.empty(most, np.float32)
    places = np.empty(width, np.int64)

    item = ticket(data)
    while item < count * kv_heads:
        n, kv_head = item // kv_heads, item % kv_heads
        used, begin, end = 0, np.int64(1) << 60, np.int64(-1)
        for place in range(width):
            t = rows[n, place]
            if t < tokens:
                places[used] = place
                if last[n, place] >= first[n, place]:
                    begin, end = min(begin, first[n, place]), max(end, last[n, place])
                for h in range(group):
                    row = wide[used * group + h]
                    widen_many(queries[t, kv_head * group + h].ctypes.data, dim, row.ctypes.data)
                    _scale(row, root)
                used += 1
        top[:], share[:], sums[:] = UNSEEN, np.float32(0), np.float32(0)
        for p in range(begin // page_size, end // page_size + 1):
            base = tables[n, p] * page_size
            low, high = max(begin - p * page_size, 0), min(end - p * page_size, page_size - 1)
            for strip in range(low // STRIP * STRIP, high + 1, STRIP):
                _read_strip(k_pages, base + strip, low - strip, high - strip, kv_head, kv_heads, k_scales, keys)
                for row in range(used * group):
                    sixteen_dots(wide[row].ctypes.data, keys.ctypes.data, dim, weights[row, strip:].ctypes.data)
            for row in range(used * group):
                place = places[row // group]
                from_, to = first[n, place] - p * page_size, last[n, place] - p * page_size
                decay = _weigh(weights[row], max(from_, low), min(to, high), top[row:], share[row:])
                if decay != np.float32(1):
                    for block in range(blocks):
                        _scale(sums[block, row], decay)
            for strip in range(low // STRIP * STRIP, high + 1, STRIP):
                _read_strip(v_pages, base + strip, low - strip, high - strip, kv_head, kv_heads, v_scales, values)
                for block in range(blocks):
                    add_strip(weights[: used * group], strip, values[block].ctypes.data, sums[block, : used * group])
        for row in range(used * group):
            t, head = rows[n, places[row // group]], kv_head * group + row % group
            factor = np.float32(1) / share[row] if share[row] > np.float32(0) else np.float32(0)
            for block in range(blocks):
                found, result = sums[block, row], results[t, head, block * BLOCK : (block + 1) * BLOCK]
                _scale(found, factor)
                for j in range(BLOCK):
                    result[j] = narrow(found[j])
                if gate:
                    _gate(result, bf16s(gate + 2 * (t * gate_stride + head * gate_step + block * BLOCK), (BLOCK,)))
        item = ticket(data)


def head_norm_rope(
    q: Tensor, k: Tensor, scales: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor] | NotImplementedType:
    if q.dtype != torch.bfloat16 or q.stride(2) != 1 or k.stride(2) != 1 or k.stride(1) != k.shape[2]:
        return NotImplemented
    tokens, heads, dim = q.shape
    queries, keys = torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k).contiguous()
    _heads(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), scales.data_ptr(), eps, cos.data_ptr(), sin.data_ptr(),
        cos.shape[1], heads, k.shape[1], dim, q.stride(1), tokens, queries.data_ptr(), keys.data_ptr(),
    )  # fmt: skip
    return queries, keys


def gated_attention(
    q: Tensor,
    gate: Tensor | None,
    k_pages: Tensor,
    v_pages: Tensor,
    tiles: QueryTiles,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor | NotImplementedType:
    if (
        q.dtype != torch.bfloat16
        or q.shape[2] % BLOCK
        or tiles.rows.shape[1] != STEP_TILE
        or k_pages.dtype == torch.float32
    ):
        return NotImplemented
    tokens, heads, dim = q.shape
    q = q.contiguous()
    count, width = tiles.rows.shape
    out = torch.empty_like(q)
    gates = (0, 0, 0) if gate is None else (gate.data_ptr(), gate.stride(0), gate.stride(1))
    call(
        _attend, q.data_ptr(), *gates, k_pages.data_ptr(), v_pages.data_ptr(),
        0 if k_scales is None else k_scales.data_ptr(), 0 if v_scales is None else v_scales.data_ptr(),
        tiles.page_size, tiles.rows.data_ptr(), tiles.first.data_ptr(), tiles.last.data_ptr(),
        tiles.tables.data_ptr(), count, width, tiles.tables.shape[1], heads, k_pages.shape[2], dim, tokens,
        out.data_ptr(),
    )  # fmt: skip
    return out
