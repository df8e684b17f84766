"""Weights that carry a packed product. Otherwise they answer as the weights they were made from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.cpu.kernels.product import Product
from stoker.backends.cpu.ops.linear import Weight, as_tensor


@dataclass(frozen=True, eq=False)
class Packed:
    """One or several [out, in] weights of the same input, rows below each other, as one product."""

    sources: tuple[Weight, ...]
    sizes: tuple[int, ...]  # outputs of each
    product: Product

    @property
    def nbytes(self) -> int:
        return sum(weight_bytes(source) for source in self.sources)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.sizes), self.sources[0].shape[-1])  # type: ignore[union-attr]

    def __getitem__(self, index: int | Tensor) -> Weight:
        return self.sources[0][index] if len(self.sources) == 1 else self.dequantize()[index]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([as_tensor(source).to(dtype) for source in self.sources])


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The same for the experts of a layer [E, out, in]: one product for all of them, or one for each.

    One for all is for few experts: gate_up holds all gates, then all ups, and down the experts side by side, so that
    routing weights of zero leave out what was not chosen.
    """

    source: Weight
    count: int
    products: tuple[Product, ...]

    @property
    def joined(self) -> bool:
        return len(self.products) == 1

    @property
    def nbytes(self) -> int:
        return weight_bytes(self.source)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)  # type: ignore[union-attr]

    def __getitem__(self, index: int | Tensor) -> Weight:
        return self.source[index]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return as_tensor(self.source).to(dtype)


def unpacked(weight: Weight) -> Weight:
    """The weight as the checkpoint stores it."""
    if isinstance(weight, PackedExperts):
        return weight.source
    return weight.sources[0] if isinstance(weight, Packed) and len(weight.sources) == 1 else weight


def weight_bytes(weight: Weight) -> int:
    return int(weight.nbytes)  # type: ignore[union-attr]  # tensors and storage formats alike have it
