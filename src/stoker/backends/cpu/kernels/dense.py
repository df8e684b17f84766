# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Projections of a step as a compiled kernel: whichever thread is free takes the next block of 64 outputs."""

from dataclasses import dataclass

import numpy as np
import torch
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from stoker.backends.cpu.kernels.compiled import bf16s, floats, narrow
from stoker.backends.cpu.kernels.pairs import DOTS, NUMBER, Blocks, copy_row, multiply
from stoker.backends.cpu.kernels.strips import BLOCK
from stoker.backends.cpu.kernels.team import arguments, call, entry, ticket


@dataclass(frozen=True, eq=False)
class BlockProduct:
    weight: Blocks

    @property
    def resident(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[T, in] bf16 -> [T, out] in bf16 or fp32, rounded once."""
        weight = self.weight
        if x.stride(1) != 1:  # rows may lie apart, their numbers not
            x = x.contiguous()
        out = x.new_empty(x.shape[0], weight.outputs, dtype=dtype)
        call(
            _product, x.data_ptr(), x.stride(0), x.shape[0], weight.inputs, weight.outputs, *weight.arguments,
            out.data_ptr(), dtype == torch.bfloat16,
        )  # fmt: skip
        return out


@entry
def _product(data):
    x, stride, tokens, inputs, outputs, codes, scales, group, kind, out, rounded = to_fixed_tuple(
        arguments(data, 11), 11
    )
    sums = np.empty((tokens, BLOCK), np.float32)
    wide = np.empty((0 if DOTS else tokens, inputs), np.float32)
    for t in range(wide.shape[0]):
        copy_row(x + 2 * t * stride, inputs, wide[t].ctypes.data)
    block = ticket(data)
    while block < outputs // BLOCK:
        rows, row_bytes = (x, 2 * stride) if DOTS else (wide.ctypes.data, NUMBER * inputs)
        sums[:] = np.float32(0)
        multiply(
            kind, rows, row_bytes, tokens, inputs, group, codes + block * (inputs // 2) * BLOCK * kind,
            scales + 4 * block * (inputs // group) * BLOCK, sums.ctypes.data,
        )  # fmt: skip
        for t in range(tokens):
            place = t * outputs + block * BLOCK
            if rounded:
                halves = bf16s(out + 2 * place, (BLOCK,))
                for j in range(BLOCK):
                    halves[j] = narrow(sums[t, j])
            else:
                floats(out + 4 * place, (BLOCK,))[:] = sums[t]
        block = ticket(data)
