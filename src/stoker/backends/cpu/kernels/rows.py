# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The small operations of a step as compiled kernels: norms, gates, routing. Each row by itself."""

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
    summed,
    widen,
)
from stoker.backends.cpu.kernels.team import arguments, call, entry, ticket


@compiled
def _norm(x, stride, scale, eps, size, tokens, out):
    weights, results = floats(scale, (size,)), bf16s(out, (tokens, size))
    wide = np.empty(size, np.float32)
    for t in range(tokens):
        row = bf16s(x + 2 * t * stride, (size,))
        for i in range(size):
            wide[i] = widen(row[i])
        factor = np.float32(1) / np.float32(math.sqrt(dot(wide, wide) / np.float32(size) + np.float32(eps)))
        for i in range(size):
            results[t, i] = narrow(wide[i] * factor * weights[i])


@entry
def _small_product(data):
    """Every row is an item."""
    x, stride, weight, inputs, outputs, tokens, out = to_fixed_tuple(arguments(data, 7), 7)
    weights, results = floats(weight, (inputs, outputs)), floats(out, (tokens, outputs))
    t = ticket(data)
    while t < tokens:
        row, result = bf16s(x + 2 * t * stride, (inputs,)), results[t]
        result[:] = np.float32(0)
        for i in range(0, inputs, 4):
            a, b, c, d = widen(row[i]), widen(row[i + 1]), widen(row[i + 2]), widen(row[i + 3])
            for j in range(outputs):
                sum = fma(b, weights[i + 1, j], fma(a, weights[i, j], result[j]))
                result[j] = fma(d, weights[i + 3, j], fma(c, weights[i + 2, j], sum))
        t = ticket(data)


@compiled
def _route(logits, stride, count, top_k, renormalize, tokens, chosen_out, weights_out):
    chosen, weights = longs(chosen_out, (tokens, top_k)), floats(weights_out, (tokens, top_k))
    shares = np.empty(count, np.float32)
    for t in range(tokens):
        row = floats(logits + 4 * t * stride, (count,))
        best, total = highest(row), np.float32(0)
        for e in range(count):
            shares[e] = exp(row[e] - best)
            total += shares[e]
            if not shares[e] >= 0:  # NaN, which `total` carries on: the kernels take the same expert only once a row
                shares[e] = np.float32(0)
        kept = np.float32(0)
        for rank in range(top_k):
            best = 0
            for e in range(1, count):
                if shares[e] > shares[best]:
                    best = e
            chosen[t, rank], weights[t, rank] = best, shares[best] / total
            kept += weights[t, rank]
            shares[best] = np.float32(-1)
        if renormalize:
            for rank in range(top_k):
                weights[t, rank] /= kept


@entry
def _best_tokens(data):
    """Every row is an item."""
    scores, stride, size, count, out = to_fixed_tuple(arguments(data, 5), 5)
    found = longs(out, (count,))
    r = ticket(data)
    while r < count:
        row, place = floats(scores + 4 * r * stride, (size,)), 0
        best = highest(row)
        while place < size - 1 and row[place] != best:
            place += 1
        found[r] = place
        r = ticket(data)


@summed
def _exp_total(row, best):
    found = np.float32(0)
    for i in range(row.shape[0]):
        found += exp(row[i] - best)
    return found


@entry
def _probabilities(data):
    logits, stride, size, count, tokens_in, out = to_fixed_tuple(arguments(data, 6), 6)
    tokens, found = longs(tokens_in, (count,)), floats(out, (count,))
    r = ticket(data)
    while r < count:
        row = floats(logits + 4 * r * stride, (size,))
        best = highest(row)
        found[r] = exp(row[tokens[r]] - best) / _exp_total(row, best)
        r = ticket(data)


def scaled_rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor | NotImplementedType:
    if x.dtype != torch.bfloat16 or scale is None or x.dim() != 2 or x.stride(1) != 1:
        return NotImplemented
    tokens, size = x.shape
    out = x.new_empty(tokens, size)
    _norm(x.data_ptr(), x.stride(0), scale.data_ptr(), eps, size, tokens, out.data_ptr())
    return out


def small_product(x: Tensor, weight: Tensor) -> Tensor:
    """bf16 x [T, in] times fp32 weight [in, out] -> fp32 [T, out]."""
    tokens, (inputs, outputs) = x.shape[0], weight.shape
    out = weight.new_empty(tokens, outputs)
    call(_small_product, x.data_ptr(), x.stride(0), weight.data_ptr(), inputs, outputs, tokens, out.data_ptr())
    return out


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor] | NotImplementedType:
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return NotImplemented
    tokens, count = logits.shape
    chosen, weights = logits.new_empty(tokens, top_k, dtype=torch.long), logits.new_empty(tokens, top_k)
    _route(
        logits.data_ptr(), logits.stride(0), count, top_k, renormalize, tokens, chosen.data_ptr(), weights.data_ptr()
    )
    return chosen, weights


def best_tokens(scores: Tensor) -> Tensor | NotImplementedType:
    if scores.dtype != torch.float32 or scores.stride(1) != 1:
        return NotImplemented
    count, size = scores.shape
    found = scores.new_empty(count, dtype=torch.long)
    call(_best_tokens, scores.data_ptr(), scores.stride(0), size, count, found.data_ptr())
    return found


def probabilities(logits: Tensor, tokens: Tensor) -> Tensor | NotImplementedType:
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not tokens.is_contiguous():
        return NotImplemented
    count, size = logits.shape
    found = logits.new_empty(count)
    call(_probabilities, logits.data_ptr(), logits.stride(0), size, count, tokens.data_ptr(), found.data_ptr())
    return found
