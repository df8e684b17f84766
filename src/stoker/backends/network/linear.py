"""Projections x @ W^T, packed or plain, and the MLP made of them. Rows do not influence each other's bits."""

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from stoker.backends.family import Family
from stoker.backends.network.elementwise import silu, whole_vectors

if TYPE_CHECKING:
    from stoker.backends.network.packing.products import Packed


class Quantized(Protocol):
    """A weight in a storage format; [out, in], or [experts, out, in] where it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, index: int | Tensor, /) -> "Quantized": ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor: ...


Weight = Tensor | Quantized


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An inference parameter, uninitialised; `dtype` overrides the model's own where the facts demand fp32."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x @ W^T without bias; weight [out, in], plain or in a storage format. A module computes it through `Fused`."""

    weight: Weight

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.users: list[Fused] = []
        self.weight = parameter(out_features, in_features)

    def __setattr__(self, name: str, value: Any) -> None:
        """A new weight ends the use of what was packed from the old one."""
        super().__setattr__(name, value)
        if name == "weight":
            for user in self.users:
                user.packed = None


class Fused:
    """Projections of the same input. Once packed, one product serves them all; when a weight is replaced they are
    computed one by one, until packed anew."""

    precise = False  # whether the result is fp32 that never was bf16

    def __init__(self, *linears: Linear) -> None:
        self._linears = linears
        self.packed: Packed | None = None
        for part in linears:
            part.users.append(self)

    def __call__(self, x: Tensor, family: Family, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """[T, out] of each, in `dtype` or that of x."""
        if self.packed is None:
            return tuple(linear(x, part.weight, family, dtype) for part in self._linears)
        return self.packed(x, dtype or x.dtype).split_with_sizes(self.packed.sizes, dim=-1)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(part.weight for part in self._linears)


class FusedGates(Fused):
    """Routers and gates, side by side in fp32, with zeros behind."""

    precise = True

    def joined(self, x: Tensor, family: Family) -> Tensor:
        """[T, all outputs or more] fp32, rows filled up with zeros to whole vectors."""
        if self.packed is not None:
            return whole_vectors(self.packed(x, torch.float32))
        return gate_linear(x, torch.cat([as_tensor(weight).float() for weight in self.weights]), family)


class DenseMlp(nn.Module):
    """down(silu(gate x) * (up x)): dense layers, shared experts, drafter layers."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.inputs, self.outputs = Fused(self.gate_proj, self.up_proj), Fused(self.down_proj)

    def forward(self, x: Tensor, family: Family) -> Tensor:
        """-> [T, H] fp32."""
        gate, up = self.inputs(x, family, torch.float32)
        return self.outputs((silu(gate) * up).to(x.dtype), family, torch.float32)[0]


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
