# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The experts of a step as one compiled kernel: a chosen expert's weights are read and decoded once for all its tokens.

Weights lie by inputs, so that a vector holds neighbouring outputs. Sixteen inputs at a time are decoded into a strip
that stays in the first-level cache while every token of the expert is multiplied with it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.ops.cpu.compiled import bf16s, compiled, floats, longs, octets, sigmoid, silu, widen
from stoker.weights.formats.int4 import ZERO_POINT, Int4, unpack_nibbles

STRIP = 16  # inputs decoded at a time
EIGHT = np.int32(ZERO_POINT)


@dataclass(frozen=True, eq=False)
class Int4Columns:
    """INT4 matrices of all experts by inputs: two codes to a byte, the first input in the low half."""

    codes: Tensor  # [E, in / 2, out] uint8
    scales: Tensor  # [E, in / group, out] fp32
    group: int

    @classmethod
    def of(cls, parts: list[Int4]) -> "Int4Columns":
        """Parts [E, out, in] of the same input, outputs behind each other."""
        codes = torch.cat([unpack_nibbles(part.qweight) for part in parts], dim=-1)  # [E, in, out]
        scales = torch.cat([part.scales for part in parts], dim=-1).float()
        return cls((codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(), scales.contiguous(), parts[0].group)


@dataclass(frozen=True, eq=False)
class StepExperts:
    """Everything a layer's experts multiply with."""

    gate_up: Int4Columns  # outputs: the gate, then up
    down: Int4Columns
    shared: tuple[Tensor, Tensor] | None = None  # the shared expert's gate and up [H, 2I] and down [I, H], fp32

    def bytes_read(self, experts: int) -> int:
        """By a step that chooses so many of them."""
        both = self.gate_up, self.down
        routed = sum(part.codes[0].nbytes + part.scales[0].nbytes for part in both)
        return experts * routed + sum(weight.nbytes for weight in self.shared or ())

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, gate: Tensor | None) -> Tensor:
        """bf16 x [T, H], chosen [T, top_k], their weights, the shared expert's gate [T, 1] before its sigmoid -> [T, H]
        fp32, experts added in order of their numbers, the shared one last."""
        tokens, size = x.shape
        up, down = self.gate_up, self.down
        width, shared = down.codes.shape[1] * 2, self.shared
        shared_width = shared[1].shape[0] if shared else 0
        strip = STRIP * max(2 * width, size)
        scratch = weights.new_empty(tokens * (2 * size + max(2 * width, 2 * shared_width)) + strip)
        out = weights.new_empty(tokens, size)
        _experts(
            x.data_ptr(), x.stride(0), chosen.data_ptr(), weights.data_ptr(), chosen.shape[1], up.codes.data_ptr(),
            up.scales.data_ptr(), up.group, down.codes.data_ptr(), down.scales.data_ptr(), down.group,
            shared[0].data_ptr() if shared else 0, shared[1].data_ptr() if shared else 0,
            0 if gate is None else gate.data_ptr(), 0 if gate is None else gate.stride(0),
            up.codes.shape[0], size, width, shared_width, tokens, scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


@compiled
def _decode(codes, scales, first, strip):
    """Inputs first .. first + 15 of all outputs."""
    for pair in range(STRIP // 2):
        for j in range(scales.shape[0]):
            both, scale = np.int32(codes[first // 2 + pair, j]), scales[j]
            strip[2 * pair, j] = np.float32((both & np.int32(15)) - EIGHT) * scale
            strip[2 * pair + 1, j] = np.float32((both >> np.int32(4)) - EIGHT) * scale


@compiled
def _add(x, rows, count, first, strip, s, out):
    """out[i] += x[rows[i]][first .. first + 15] times sixteen rows of the strip, from row s on."""
    for i in range(count):
        r = rows[i]
        a, b, c, d = x[r, first], x[r, first + 1], x[r, first + 2], x[r, first + 3]
        e, f, g, h = x[r, first + 4], x[r, first + 5], x[r, first + 6], x[r, first + 7]
        k, z, m, n = x[r, first + 8], x[r, first + 9], x[r, first + 10], x[r, first + 11]
        o, p, q, t = x[r, first + 12], x[r, first + 13], x[r, first + 14], x[r, first + 15]
        for j in range(out.shape[1]):
            u = (a * strip[s, j] + b * strip[s + 1, j]) + (c * strip[s + 2, j] + d * strip[s + 3, j])
            v = (e * strip[s + 4, j] + f * strip[s + 5, j]) + (g * strip[s + 6, j] + h * strip[s + 7, j])
            w = (k * strip[s + 8, j] + z * strip[s + 9, j]) + (m * strip[s + 10, j] + n * strip[s + 11, j])
            y = (o * strip[s + 12, j] + p * strip[s + 13, j]) + (q * strip[s + 14, j] + t * strip[s + 15, j])
            out[i, j] += (u + v) + (w + y)


@compiled
def _multiply(x, rows, count, codes, scales, group, strip, out):
    """out[i] = x[rows[i]] times an INT4 matrix, for the first `count` rows."""
    out[:count] = np.float32(0)
    for first in range(0, 2 * codes.shape[0], STRIP):
        _decode(codes, scales[first // group], first, strip)
        _add(x, rows, count, first, strip, 0, out)


@compiled
def _multiply_plain(x, rows, count, weight, out):
    """The same with a matrix in fp32."""
    out[:count] = np.float32(0)
    for first in range(0, weight.shape[0], STRIP):
        _add(x, rows, count, first, weight, first, out)


@compiled
def _activate(hidden, count, width):
    """silu(gate) * up, where the gate was."""
    for i in range(count):
        for j in range(width):
            hidden[i, j] = silu(hidden[i, j]) * hidden[i, width + j]


@compiled
def _experts(
    x, stride, chosen_in, weights_in, top_k, up_codes, up_scales, up_group, down_codes, down_scales, down_group,
    shared_up, shared_down, gate, gate_stride, experts, size, width, shared_width, tokens, scratch, out,
):  # fmt: skip
    chosen, weights = longs(chosen_in, (tokens, top_k)), floats(weights_in, (tokens, top_k))
    results = floats(out, (tokens, size))
    widest = max(2 * width, 2 * shared_width)
    wide = floats(scratch, (tokens, size))
    hidden = floats(scratch + 4 * tokens * size, (tokens, 2 * width))
    shared_hidden = floats(scratch + 4 * tokens * size, (tokens, 2 * shared_width))
    found = floats(scratch + 4 * tokens * (size + widest), (tokens, size))
    strip = floats(scratch + 4 * tokens * (2 * size + widest), (STRIP, max(2 * width, size)))
    rows, shares, places = np.empty(tokens, np.int64), np.empty(tokens, np.float32), np.arange(tokens)
    results[:] = np.float32(0)
    for t in range(tokens):
        row = bf16s(x + 2 * t * stride, (size,))
        for i in range(size):
            wide[t, i] = widen(row[i])
    for e in range(experts):
        count = 0
        for t in range(tokens):
            for rank in range(top_k):
                if chosen[t, rank] == e:
                    rows[count], shares[count] = t, weights[t, rank]
                    count += 1
        if count:
            codes = octets(up_codes + e * size // 2 * 2 * width, (size // 2, 2 * width))
            scales = floats(up_scales + 4 * e * (size // up_group) * 2 * width, (size // up_group, 2 * width))
            _multiply(wide, rows, count, codes, scales, up_group, strip, hidden)
            _activate(hidden, count, width)
            codes = octets(down_codes + e * width // 2 * size, (width // 2, size))
            scales = floats(down_scales + 4 * e * (width // down_group) * size, (width // down_group, size))
            _multiply(hidden, places, count, codes, scales, down_group, strip, found)
            for i in range(count):
                result, share = results[rows[i]], shares[i]
                for j in range(size):
                    result[j] += found[i, j] * share
    if shared_width:
        up, down = floats(shared_up, (size, 2 * shared_width)), floats(shared_down, (shared_width, size))
        _multiply_plain(wide, places, tokens, up, shared_hidden)
        _activate(shared_hidden, tokens, shared_width)
        _multiply_plain(shared_hidden, places, tokens, down, found)
        for t in range(tokens):
            share = sigmoid(floats(gate + 4 * t * gate_stride, (1,))[0])
            for j in range(size):
                results[t, j] += found[t, j] * share
