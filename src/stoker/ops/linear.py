"""Dense projections x @ W^T whose rows do not influence each other's bits."""

import torch
from torch import Tensor

from stoker.ops.dispatch import operation
from stoker.ops.family import Family


@operation
def linear(x: Tensor, weight: Tensor, family: Family) -> Tensor:
    """[T, in] x [out, in] -> [T, out], in the dtype of the weight, in tiles of `family.tile` rows."""
    rows, tile = x.shape[0], family.tile
    padding = -rows % tile
    x = x.to(weight.dtype)
    if padding:
        x = torch.cat([x, x.new_zeros(padding, x.shape[1])])
    out = x.new_empty(rows + padding, weight.shape[0])
    transposed = weight.t()
    for start in range(0, rows + padding, tile):
        torch.mm(x[start : start + tile], transposed, out=out[start : start + tile])
    return out[:rows]
