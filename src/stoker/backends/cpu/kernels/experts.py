# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The experts of a step as one compiled kernel: a chosen expert's weights are read once for all its tokens.

Weights lie in blocks of 64 outputs and are decoded in registers for up to six tokens at a time (`pairs.py`).
First all blocks of gate and up are computed, by whichever thread is free, then all columns of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from stoker.backends.cpu.kernels.compiled import compiled, floats, fma, longs, sigmoid, silu
from stoker.backends.cpu.kernels.pairs import NUMBER, Blocks, copy_row, multiply, round_row
from stoker.backends.cpu.kernels.strips import BLOCK
from stoker.backends.cpu.kernels.team import arguments, call, entry, finish, second_ticket, ticket, wait
from stoker.backends.cpu.ops.linear import Weight

HALF = BLOCK // 2  # of gate, and of up


def gate_beside_up(width: int) -> Tensor:
    """The order of gate and up [2 * width] in which each block has the gates of 32 outputs, then their ups."""
    return torch.arange(2 * width).view(2, -1, HALF).transpose(0, 1).flatten()


@dataclass(frozen=True, eq=False)
class StepExperts:
    """Everything a layer's experts multiply with."""

    gate_up: Blocks
    down: Blocks
    shared: tuple[Blocks, Blocks] | None  # the shared expert's gate and up, and its down

    @classmethod
    def of(
        cls,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        shared: tuple[Weight, Weight, Weight] | None = None,
    ) -> "StepExperts | None":
        """gate_up [E, 2I, H] and down [E, H, I], perhaps in parts of fewer outputs; the shared expert's gate, up
        [I', H] and down [H, I']. None where the kernel does not take them."""
        routed = _mlp(gate_up, down)
        own = _mlp(shared[:2], shared[2:]) if shared else None
        return None if routed is None or (shared and own is None) else cls(*routed, own)

    def bytes_read(self, experts: int) -> int:
        """By a step that chooses so many of them."""
        routed = (self.gate_up.nbytes + self.down.nbytes) // self.gate_up.codes.shape[0]
        return experts * routed + sum(weight.nbytes for weight in self.shared or ())

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, gate: Tensor | None) -> Tensor:
        """bf16 x [T, H], chosen [T, top_k], their weights, the shared expert's gate [T, 1] before its sigmoid -> [T, H]
        fp32, experts added in order of their numbers, the shared one last."""
        tokens, size = x.shape
        up, down = self.gate_up, self.down
        own_up, own_down = self.shared or (up, down)
        width, top_k = down.inputs, chosen.shape[1]
        shared_width = own_down.inputs if self.shared else 0
        scratch = torch.empty(tokens * (top_k * width + shared_width) * NUMBER, dtype=torch.uint8)
        out = weights.new_empty(tokens, size)
        call(
            _experts, x.data_ptr(), x.stride(0), chosen.data_ptr(), weights.data_ptr(), top_k, *up.arguments,
            *down.arguments, *own_up.arguments, *own_down.arguments,
            0 if gate is None else gate.data_ptr(), 0 if gate is None else gate.stride(0),
            up.codes.shape[0], size, width, shared_width, tokens, scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


def _mlp(gate_up: Sequence[Weight], down: Sequence[Weight]) -> tuple[Blocks, Blocks] | None:
    outputs: list[int] = [part.shape[-2] for part in gate_up]  # type: ignore[union-attr]
    width = sum(outputs) // 2
    if width % HALF:
        return None
    both = Blocks.of(*gate_up, order=gate_beside_up(width)), Blocks.of(*down)
    return None if both[0] is None or both[1] is None else (both[0], both[1])


@compiled
def _product(kind, rows, count, inputs, group, codes, scales, block, sums):
    """sums [count, 64] = rows that lie behind each other times one block of a matrix."""
    sums[:count] = np.float32(0)
    multiply(
        kind, rows, NUMBER * inputs, count, inputs, group, codes + block * (inputs // 2) * BLOCK * kind,
        scales + 4 * block * (inputs // group) * BLOCK, sums.ctypes.data,
    )  # fmt: skip


@compiled
def _activate(sums, count, block, width, hidden):
    """silu(gate) * up of a block, into 32 columns of the hidden rows [count, width] at an address."""
    active = np.empty(HALF, np.float32)
    for i in range(count):
        for j in range(HALF):
            active[j] = silu(sums[i, j]) * sums[i, HALF + j]
        round_row(active, hidden + NUMBER * (i * width + HALF * block))


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
        x, stride, chosen, weights_in, top_k, up_codes, up_scales, up_group, up_kind, down_codes, down_scales,
        down_group, down_kind, own_up, own_up_scales, own_up_group, own_up_kind, own_down, own_down_scales,
        own_down_group, own_down_kind, gate, gate_stride, experts, size, width, shared_width, tokens, hidden, out,
    ) = to_fixed_tuple(arguments(data, 30), 30)  # fmt: skip
    weights, results = floats(weights_in, (tokens * top_k,)), floats(out, (tokens, size))
    shared_hidden = hidden + NUMBER * tokens * top_k * width
    rows, order, begins, used = _by_expert(longs(chosen, (tokens * top_k,)), experts, top_k)
    sums, row_bytes = np.empty((tokens, BLOCK), np.float32), NUMBER * size
    gathered, holds = np.empty(tokens * row_bytes, np.uint8), -1

    blocks = width // HALF
    routed, items = len(used) * blocks, len(used) * blocks + shared_width // HALF
    item = ticket(data)
    while item < items:
        which, block = (item // blocks, item % blocks) if item < routed else (len(used), item - routed)
        first, stop = (begins[used[which]], begins[used[which] + 1]) if item < routed else (0, tokens)
        inputs = gathered.ctypes.data  # taken anew each time: an array lives until its last mention
        if which != holds:
            holds = which
            for i in range(first, stop):
                row = rows[i] if item < routed else i
                copy_row(x + 2 * row * stride, size, inputs + (i - first) * row_bytes)
        count = stop - first
        if item < routed:
            place = used[which] * blocks + block
            _product(up_kind, inputs, count, size, up_group, up_codes, up_scales, place, sums)
            _activate(sums, count, block, width, hidden + NUMBER * first * width)
        else:
            _product(own_up_kind, inputs, count, size, own_up_group, own_up, own_up_scales, block, sums)
            _activate(sums, count, block, shared_width, shared_hidden)
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
            active = hidden + NUMBER * first * width
            _product(down_kind, active, stop - first, width, down_group, down_codes, down_scales, place, sums)
            for i in range(first, stop):
                share = weights[order[i]]
                for j in range(BLOCK):
                    result[rows[i], j] = fma(sums[i - first, j], share, result[rows[i], j])
        if shared_width:
            _product(
                own_down_kind, shared_hidden, tokens, shared_width, own_down_group, own_down, own_down_scales, column,
                sums,
            )  # fmt: skip
            for t in range(tokens):
                share = sigmoid(floats(gate + 4 * t * gate_stride, (1,))[0])
                for j in range(BLOCK):
                    result[t, j] = fma(sums[t, j], share, result[t, j])
        column = second_ticket(data)
