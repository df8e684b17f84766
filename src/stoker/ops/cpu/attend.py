# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention of steps as compiled kernels: norm and rope of queries and keys, then a pass over the visible pages.

Each row visits its pages from the first visible one on, 64 keys at a time, with a running maximum. Nothing depends on
the other rows or on what is cached behind a row's own keys.
"""

import math
from types import NotImplementedType

import numpy as np
import torch
from torch import Tensor

from stoker.ops.attention import QueryTiles
from stoker.ops.cpu.compiled import bf16s, compiled, dot, exp, floats, longs, narrow, octets, sigmoid, widen
from stoker.ops.family import STEP_TILE

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
def _read(pages, place, head, kv_heads, dim, scales, out):
    """The key or value at a place, from bf16 or, where there are scales, from FP8."""
    start = (place * kv_heads + head) * dim
    if scales == 0:
        row = bf16s(pages + 2 * start, (dim,))
        for i in range(dim):
            out[i] = widen(row[i])
        return
    codes, scale = octets(pages + start, (dim,)), widen(bf16s(scales + 2 * (place * kv_heads + head), (1,))[0])
    for i in range(dim):
        code = np.uint32(codes[i])
        bits = ((code & np.uint32(0x80)) << np.uint32(24)) | ((code & np.uint32(0x7F)) << np.uint32(20))
        out[i] = np.uint32(bits).view(np.float32) * E4M3_SHIFT * scale


@compiled
def _attend(
    q, gate, gate_stride, gate_step, k_pages, v_pages, k_scales, v_scales, page_size, rows, first, last, tables,
    count, width, table_size, heads, kv_heads, dim, tokens, out,
):  # fmt: skip
    group = heads // kv_heads
    queries, results = bf16s(q, (tokens, heads, dim)), bf16s(out, (tokens, heads, dim))
    row_of, begins = longs(rows, (count, width)), longs(first, (count, width))
    ends, pages = longs(last, (count, width)), longs(tables, (count, table_size))
    root = np.float32(1) / np.float32(math.sqrt(dim))
    wide, vector = np.empty((group, dim), np.float32), np.empty(dim, np.float32)
    sums, weights = np.empty((group, dim), np.float32), np.empty((group, page_size), np.float32)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    for n in range(count):
        for place in range(width):
            t, begin, end = row_of[n, place], begins[n, place], ends[n, place]
            if t >= tokens:
                continue
            for kv_head in range(kv_heads):
                for h in range(group):
                    top[h], total[h] = UNSEEN, np.float32(0)
                    for i in range(dim):
                        wide[h, i] = widen(queries[t, kv_head * group + h, i]) * root
                        sums[h, i] = np.float32(0)
                for p in range(begin // page_size, end // page_size + 1):
                    base = pages[n, p] * page_size
                    low, high = max(begin - p * page_size, 0), min(end - p * page_size, page_size - 1)
                    weights[:] = UNSEEN
                    for key in range(low, high + 1):
                        _read(k_pages, base + key, kv_head, kv_heads, dim, k_scales, vector)
                        for h in range(group):
                            weights[h, key] = dot(wide[h], vector)
                    for h in range(group):
                        highest = top[h]
                        for key in range(page_size):
                            highest = max(highest, weights[h, key])
                        decay = exp(top[h] - highest)
                        top[h] = highest
                        total[h] *= decay
                        for i in range(dim):
                            sums[h, i] *= decay
                        for key in range(page_size):
                            weights[h, key] = exp(weights[h, key] - highest)
                    for key in range(low, high + 1):
                        _read(v_pages, base + key, kv_head, kv_heads, dim, v_scales, vector)
                        for h in range(group):
                            weight = weights[h, key]
                            total[h] += weight
                            for i in range(dim):
                                sums[h, i] += weight * vector[i]
                for h in range(group):
                    head = kv_head * group + h
                    share = np.float32(1) / total[h] if end >= begin else np.float32(0)
                    if gate != 0:
                        gates = bf16s(gate + 2 * (t * gate_stride + head * gate_step), (dim,))
                        for i in range(dim):
                            value = widen(narrow(sums[h, i] * share))
                            results[t, head, i] = narrow(value * sigmoid(widen(gates[i])))
                    else:
                        for i in range(dim):
                            results[t, head, i] = narrow(sums[h, i] * share)


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
    if q.dtype != torch.bfloat16 or tiles.rows.shape[1] != STEP_TILE or k_pages.dtype == torch.float32:
        return NotImplemented
    tokens, heads, dim = q.shape
    q = q.contiguous()
    count, width = tiles.rows.shape
    out = torch.empty_like(q)
    gates = (0, 0, 0) if gate is None else (gate.data_ptr(), gate.stride(0), gate.stride(1))
    _attend(
        q.data_ptr(), *gates, k_pages.data_ptr(), v_pages.data_ptr(),
        0 if k_scales is None else k_scales.data_ptr(), 0 if v_scales is None else v_scales.data_ptr(),
        tiles.page_size, tiles.rows.data_ptr(), tiles.first.data_ptr(), tiles.last.data_ptr(),
        tiles.tables.data_ptr(), count, width, tiles.tables.shape[1], heads, k_pages.shape[2], dim, tokens,
        out.data_ptr(),
    )  # fmt: skip
    return out
