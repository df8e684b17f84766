# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The experts of a step as one compiled kernel: a chosen expert's weights are read once for all its tokens.

Weights lie in blocks of 64 outputs, input after input, and are decoded in registers for up to six tokens at a time.
First all blocks of gate and up are computed, by whichever thread is free, then all columns of the result.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from stoker.ops.cpu.compiled import bf16s, compiled, floats, fma, longs, sigmoid, silu, widen
from stoker.ops.cpu.strips import BF16, BLOCK, FP32, STRIP, add_bf16, add_fp32, add_int4
from stoker.ops.cpu.team import arguments, call, entry, finish, second_ticket, ticket, wait
from stoker.weights.formats.int4 import ZERO_POINT, Int4, unpack_nibbles

HALF = BLOCK // 2  # of gate, and of up


@dataclass(frozen=True, eq=False)
class Int4Blocks:
    """INT4 matrices of all experts: two signed codes to a byte, the input of the even number in the low half."""

    codes: Tensor  # [E, blocks, in / 2, 64] uint8
    scales: Tensor  # [E, blocks, in / group, 64] fp32
    group: int

    @classmethod
    def of(cls, parts: list[Int4], order: Tensor | None = None) -> "Int4Blocks":
        """Parts [E, out, in] of the same input, outputs behind each other, then in `order`."""
        codes = torch.cat([unpack_nibbles(part.qweight) for part in parts], dim=-1) ^ ZERO_POINT  # [E, in, out]
        scales = torch.cat([part.scales for part in parts], dim=-1).float()
        if order is not None:
            codes, scales = codes[..., order], scales[..., order]
        return cls(_blocks(codes[:, 0::2] | codes[:, 1::2] << 4), _blocks(scales), parts[0].group)


def _blocks(x: Tensor) -> Tensor:
    """[..., n, out] -> [..., out / 64, n, 64]"""
    return x.unflatten(-1, (-1, BLOCK)).transpose(-3, -2).contiguous()


def gate_beside_up(width: int) -> Tensor:
    """The order of gate and up [2 * width] in which each block has the gates of 32 outputs, then their ups."""
    return torch.arange(2 * width).view(2, -1, HALF).transpose(0, 1).flatten()


@dataclass(frozen=True, eq=False)
class StepExperts:
    """Everything a layer's experts multiply with."""

    gate_up: Int4Blocks
    down: Int4Blocks
    shared: tuple[Tensor, Tensor] | None  # the shared expert's blocks of gate and up, and of down: bf16 or fp32

    @classmethod
    def of(cls, gate_up: list[Int4], down: list[Int4], shared: tuple[Tensor, Tensor] | None = None) -> "StepExperts":
        """gate_up [E, 2I, H] and down [E, H, I], perhaps in parts; shared [2I', H] and [H, I'], in fp32."""
        width = sum(part.shape[-2] for part in gate_up) // 2
        order = gate_beside_up(width)
        if shared:
            up, result = shared[0].t()[:, gate_beside_up(shared[0].shape[0] // 2)], shared[1].t()
            exact = all(torch.equal(part.bfloat16().float(), part) for part in shared)
            dtype = torch.bfloat16 if exact else torch.float32
            shared = _blocks(up).to(dtype), _blocks(result).to(dtype)
        return cls(Int4Blocks.of(gate_up, order), Int4Blocks.of(down), shared)

    @staticmethod
    def takes(size: int, *widths: int) -> bool:
        """Whether the kernel is for a hidden size and experts of these widths."""
        return size % BLOCK == 0 and all(width % HALF == 0 for width in widths)

    def bytes_read(self, experts: int) -> int:
        """By a step that chooses so many of them."""
        both = self.gate_up, self.down
        routed = sum(part.codes[0].nbytes + part.scales[0].nbytes for part in both)
        return experts * routed + sum(weight.nbytes for weight in self.shared or ())

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, gate: Tensor | None) -> Tensor:
        """bf16 x [T, H], chosen [T, top_k], their weights, the shared expert's gate [T, 1] before its sigmoid -> [T, H]
        fp32, experts added in order of their numbers, the shared one last."""
        tokens, size = x.shape
        up, down, shared = self.gate_up, self.down, self.shared
        width, top_k = down.codes.shape[2] * 2, chosen.shape[1]
        shared_width = shared[1].shape[1] if shared else 0
        scratch = weights.new_empty(tokens * (top_k * width + shared_width))
        out = weights.new_empty(tokens, size)
        call(
            _experts, x.data_ptr(), x.stride(0), chosen.data_ptr(), weights.data_ptr(), top_k, up.codes.data_ptr(),
            up.scales.data_ptr(), up.group, down.codes.data_ptr(), down.scales.data_ptr(), down.group,
            shared[0].data_ptr() if shared else 0, shared[1].data_ptr() if shared else 0,
            BF16 if shared and shared[0].dtype == torch.bfloat16 else FP32,
            0 if gate is None else gate.data_ptr(), 0 if gate is None else gate.stride(0),
            up.codes.shape[0], size, width, shared_width, tokens, scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


@compiled
def _multiply(x, codes, scales, group, part, sums):
    """sums [count, 64] = x [count, in] times a block of an INT4 matrix; a group's sum is scaled when it is complete."""
    part, sums = part[: x.shape[0]], sums[: x.shape[0]]
    sums[:] = np.float32(0)
    for start in range(0, x.shape[1], group):
        part[:] = np.float32(0)
        for first in range(start, start + group, STRIP):
            add_int4(x, first, codes + first // 2 * BLOCK, part)
        scale = floats(scales + 4 * (start // group) * BLOCK, (BLOCK,))
        for i in range(sums.shape[0]):
            for j in range(BLOCK):
                sums[i, j] = fma(part[i, j], scale[j], sums[i, j])


@compiled
def _multiply_plain(x, weights, kind, sums):
    """The same with a block in bf16 or fp32."""
    sums[:] = np.float32(0)
    for first in range(0, x.shape[1], STRIP):
        if kind == BF16:
            add_bf16(x, first, weights + 2 * first * BLOCK, sums)
        else:
            add_fp32(x, first, weights + 4 * first * BLOCK, sums)


@compiled
def _activate(sums, block, hidden):
    """silu(gate) * up of a block, into 32 columns of hidden."""
    for i in range(sums.shape[0]):
        for j in range(HALF):
            hidden[i, HALF * block + j] = silu(sums[i, j]) * sums[i, HALF + j]


@compiled
def _gather(x, stride, rows, wide):
    for i in range(rows.shape[0]):
        row = bf16s(x + 2 * rows[i] * stride, (wide.shape[1],))
        for j in range(wide.shape[1]):
            wide[i, j] = widen(row[j])


@compiled
def _by_expert(chosen, experts, top_k):
    """Tokens and places in `chosen` in the order of their experts, where those of each expert begin, and the experts
    that were chosen."""
    begins = np.zeros(experts + 1, np.int64)
    for place in range(chosen.shape[0]):
        begins[chosen[place] + 1] += 1
    used, count = np.empty(experts, np.int64), 0
    for e in range(experts):
        if begins[e + 1]:
            used[count] = e
            count += 1
        begins[e + 1] += begins[e]
    order, following = np.empty(chosen.shape[0], np.int64), begins.copy()
    for place in range(chosen.shape[0]):
        order[following[chosen[place]]] = place
        following[chosen[place]] += 1
    return order // top_k, order, begins, used[:count]


@entry
def _experts(data):
    (
        x, stride, chosen, weights_in, top_k, up_codes, up_scales, up_group, down_codes, down_scales, down_group,
        shared_up, shared_down, kind, gate, gate_stride, experts, size, width, shared_width, tokens, scratch, out,
    ) = to_fixed_tuple(arguments(data, 23), 23)  # fmt: skip
    weights, results = floats(weights_in, (tokens * top_k,)), floats(out, (tokens, size))
    hidden = floats(scratch, (tokens * top_k, width))
    shared_hidden = floats(scratch + 4 * tokens * top_k * width, (tokens, shared_width))
    rows, order, begins, used = _by_expert(longs(chosen, (tokens * top_k,)), experts, top_k)
    wide = np.empty((tokens, size), np.float32)
    sums, part = np.empty((tokens, BLOCK), np.float32), np.empty((tokens, BLOCK), np.float32)

    blocks = width // HALF
    routed, items = len(used) * blocks, len(used) * blocks + shared_width // HALF
    item = ticket(data)
    while item < items:
        if item < routed:
            e, block = used[item // blocks], item % blocks
            first, stop = begins[e], begins[e + 1]
            place = e * blocks + block
            _gather(x, stride, rows[first:stop], wide)
            _multiply(
                wide[: stop - first], up_codes + place * size // 2 * BLOCK,
                up_scales + 4 * place * (size // up_group) * BLOCK, up_group, part, sums,
            )  # fmt: skip
            _activate(sums[: stop - first], block, hidden[first:stop])
        else:
            block = item - routed
            _gather(x, stride, np.arange(tokens), wide)
            _multiply_plain(wide, shared_up + kind // 2 * block * size * BLOCK, kind, sums)
            _activate(sums, block, shared_hidden)
        finish(data)
        item = ticket(data)
    wait(data, items)

    column = second_ticket(data)
    while column < size // BLOCK:
        result = results[:, column * BLOCK : (column + 1) * BLOCK]
        result[:] = np.float32(0)
        for e in used:
            first, stop = begins[e], begins[e + 1]
            place = e * (size // BLOCK) + column
            _multiply(
                hidden[first:stop], down_codes + place * width // 2 * BLOCK,
                down_scales + 4 * place * (width // down_group) * BLOCK, down_group, part, sums,
            )  # fmt: skip
            for i in range(first, stop):
                share = weights[order[i]]
                for j in range(BLOCK):
                    result[rows[i], j] = fma(sums[i - first, j], share, result[rows[i], j])
        if shared_width:
            _multiply_plain(shared_hidden, shared_down + kind // 2 * column * shared_width * BLOCK, kind, sums)
            for t in range(tokens):
                share = sigmoid(floats(gate + 4 * t * gate_stride, (1,))[0])
                for j in range(BLOCK):
                    result[t, j] = fma(sums[t, j], share, result[t, j])
        column = second_ticket(data)
