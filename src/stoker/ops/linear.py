"""Dense projections x @ W^T whose rows do not influence each other's bits."""

from typing import Protocol

import torch
from torch import Tensor

from stoker.ops.dispatch import operation
from stoker.ops.family import Family


class Quantized(Protocol):
    """A weight in a storage format; [out, in], or [experts, out, in] where it is indexed."""

    def __getitem__(self, index: int | Tensor, /) -> "Quantized": ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor: ...


Weight = Tensor | Quantized


@operation
def linear(x: Tensor, weight: Weight, family: Family) -> Tensor:
    """[T, in] x [out, in] -> [T, out] in the dtype of x, in tiles of `family.tile` rows.

    A quantised weight is multiplied as fp32, which holds every format's values exactly; only the result is rounded.
    """
    dtype = x.dtype
    dense = as_tensor(weight)
    rows, tile = x.shape[0], family.tile
    padding = -rows % tile
    x = x.to(dense.dtype)
    if padding:
        x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
    out = x.new_empty(rows + padding, dense.shape[0])
    for start in range(0, rows + padding, tile):
        torch.mm(x[start : start + tile], dense.t(), out=out[start : start + tile])
    return out[:rows].to(dtype)


def as_tensor(weight: Weight) -> Tensor:
    """The values: a plain tensor as it is, a quantised one in fp32."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()
