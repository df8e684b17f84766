"""Dense projections x @ W^T whose rows do not influence each other's bits."""

from typing import Protocol

import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.ops.elementwise import whole_vectors


class Quantized(Protocol):
    """A weight in a storage format; [out, in], or [experts, out, in] where it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: int | Tensor, /) -> "Quantized": ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor: ...


Weight = Tensor | Quantized


def linear(x: Tensor, weight: Weight, family: Family, dtype: torch.dtype | None = None) -> Tensor:
    """[T, in] x [out, in] -> [T, out] in `dtype` (that of x by default), in tiles of `family.tile` rows.

    A quantised weight is multiplied as fp32, which holds every format's values exactly; only the result is rounded.
    """
    dense = as_tensor(weight)
    return tiled(x.to(dense.dtype), dense, family.tile).to(dtype or x.dtype)


def gate_linear(x: Tensor, weight: Weight, family: Family) -> Tensor:
    """[T, in] x [out, in] -> fp32 [T, out or more], rows filled up with zeros to whole vectors. Computed in fp32
    whatever the activations are: routers and gates, where precision matters and rows are short."""
    return whole_vectors(linear(x.float(), as_tensor(weight).float(), family))


def tiled(x: Tensor, dense: Tensor, tile: int) -> Tensor:
    """The product in tiles of exactly that many rows, the last filled up: one GEMM shape, whatever the rows."""
    rows = x.shape[0]
    padding = -rows % tile
    if padding:
        x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
    out = x.new_empty(rows + padding, dense.shape[0])
    for start in range(0, rows + padding, tile):
        torch.mm(x[start : start + tile], dense.t(), out=out[start : start + tile])
    return out[:rows]


def as_tensor(weight: Weight) -> Tensor:
    """The values: a plain tensor as it is, a quantised one in fp32."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()
