# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The experts of a step as one compiled kernel: a chosen expert's weights are read and decoded once for all its tokens.

Weights lie by inputs, so that a vector holds neighbouring outputs. Eight inputs at a time are decoded into a strip that
stays in the first-level cache while every token of the expert is multiplied with it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.ops.cpu.compiled import bf16s, compiled, floats, longs, octets, sigmoid, silu, widen
from stoker.weights.formats.int4 import ZERO_POINT, Int4, unpack_nibbles

STRIP = 8  # inputs decoded at a time
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
    """Inputs first .. first + 7 of all outputs."""
    for pair in range(STRIP // 2):
        row, low, high = codes[first // 2 + pair], strip[2 * pair], strip[2 * pair + 1]
        for j in range(scales.shape[0]):
            both, scale = np.int32(row[j]), scales[j]
            low[j] = np.float32((both & np.int32(15)) - EIGHT) * scale
            high[j] = np.float32((both >> np.int32(4)) - EIGHT) * scale


@compiled
def _add(x, first, strip, row, out):
    """out += x[first .. first + 7] times eight rows of the strip, from `row` on."""
    a, b, c, d = x[first], x[first + 1], x[first + 2], x[first + 3]
    e, f, g, h = x[first + 4], x[first + 5], x[first + 6], x[first + 7]
    s, t, u, v = strip[row], strip[row + 1], strip[row + 2], strip[row + 3]
    w, y, z, q = strip[row + 4], strip[row + 5], strip[row + 6], strip[row + 7]
    for j in range(out.shape[0]):
        low = (a * s[j] + b * t[j]) + (c * u[j] + d * v[j])
        out[j] += low + ((e * w[j] + f * y[j]) + (g * z[j] + h * q[j]))


@compiled
def _multiply(x, rows, count, codes, scales, group, strip, out):
    """out[i] = x[rows[i]] times an INT4 matrix, for the first `count` rows."""
    out[:count] = np.float32(0)
    for first in range(0, 2 * codes.shape[0], STRIP):
        _decode(codes, scales[first // group], first, strip)
        for i in range(count):
            _add(x[rows[i]], first, strip, 0, out[i])


@compiled
def _multiply_plain(x, rows, count, weight, out):
    """The same with a matrix in fp32."""
    out[:count] = np.float32(0)
    for first in range(0, weight.shape[0], STRIP):
        for i in range(count):
            _add(x[rows[i]], first, weight, first, out[i])


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
