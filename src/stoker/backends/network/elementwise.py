"""Activations that give an element the same bits wherever it lies in memory.

torch.sigmoid, silu and softplus compute what is left of a buffer after whole vectors with scalar code that rounds
differently (measured: 8 of 31 row subsets differ at width 100), so a row's bits would depend on the rows beside it.
Rows of whole vectors leave nothing over, as long as the buffer is not dealt to threads. Other rows use exp, which has
no such flaw.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

VECTORS = 32  # elements: two vectors of the widest CPU, which is what torch takes at a time
SERIAL = 32_767  # elements that torch does not deal to several threads


def sigmoid(x: Tensor) -> Tensor:
    """fp32 logistic function."""
    x = x.float()
    if x.shape[-1] % VECTORS:
        return 1.0 / (1.0 + torch.exp(-x))
    return _in_pieces(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """fp32 x * sigmoid(x)."""
    x = x.float()
    if x.shape[-1] % VECTORS:
        return x / (1.0 + torch.exp(-x))
    return _in_pieces(functional.silu, x)


def softplus(x: Tensor) -> Tensor:
    """fp32 log(1 + exp(x)), linear above 20 as in torch and vLLM."""
    x = x.float()
    if x.shape[-1] % VECTORS:
        return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))
    return _in_pieces(functional.softplus, x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32, in the dtype of `gate`."""
    return (silu(gate) * up.float()).to(gate.dtype)


def _in_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The function on whole rows, as many at a time as one thread computes; contiguous, so that vectors are whole."""
    x = x.contiguous()
    if x.numel() <= SERIAL or x.device.type != "cpu":
        return function(x)
    rows = x.flatten(0, -2)
    pieces = rows.split(max(1, SERIAL // x.shape[-1]))
    return torch.cat([function(piece) for piece in pieces]).view(x.shape)


def whole_vectors(x: Tensor) -> Tensor:
    """Zeros behind each row up to whole vectors; worth it for rows of a few elements, where the long way costs more."""
    return functional.pad(x, (0, -x.shape[-1] % VECTORS))
