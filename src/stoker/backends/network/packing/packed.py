"""Packed weights: what multiplies bf16 rows with one or several projections, or with the experts of a layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.backends.network.ops.elementwise import silu
from stoker.backends.network.ops.experts import add_by_rank
from stoker.backends.network.packing.products import ROWS, Product


@dataclass(frozen=True, eq=False)
class Packed:
    """One or several [out, in] weights of the same input, rows below each other, as one product."""

    product: Product
    sizes: tuple[int, ...]  # outputs of each

    @property
    def resident(self) -> int:
        """Bytes a step reads of it."""
        return self.product.resident

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, in] bf16 -> [T, sum of sizes] in `dtype`."""
        return _by_rows(self.product, x).to(dtype)


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """The experts of a layer: one product for all of them, or one for each.

    One for all is for few experts: `gate_up` holds all gates, then all ups, and `down` the experts side by side, so
    that routing weights of zero leave out what was not chosen.
    """

    count: int
    gate_up: Sequence[Product]
    down: Sequence[Product]

    @property
    def joined(self) -> bool:
        return len(self.gate_up) == 1

    @property
    def resident(self) -> int:
        """Bytes of all experts."""
        return sum(product.resident for product in (*self.gate_up, *self.down))

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """As `routed_experts`, for bf16 rows."""
        return self._all(x, experts, weights) if self.joined else self._each(x, experts, weights)

    def _all(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Every expert computes every token; the routing weight, mostly zero, is put on before the last product."""
        share = weights.new_zeros(x.shape[0], self.count).scatter_(1, experts, weights)
        gate, up = _by_rows(self.gate_up[0], x).chunk(2, dim=1)
        active = (silu(gate) * up).view(x.shape[0], self.count, -1).mul_(share[:, :, None])
        return _by_rows(self.down[0], active.flatten(1).to(x.dtype)).float()

    def _each(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens in the order of their experts; each expert that was chosen computes its own."""
        tokens, top_k = experts.shape
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.count).tolist()
        inputs = x.index_select(0, order // top_k).split(counts)
        chosen = [expert for expert, count in enumerate(counts) if count]
        hidden = torch.cat([_by_rows(self.gate_up[e], inputs[e]) for e in chosen]).float()
        gate, up = hidden.chunk(2, dim=1)
        active = silu(gate).mul_(up).to(x.dtype).split(counts)
        sorted_out = torch.cat([_by_rows(self.down[e], active[e]) for e in chosen])
        outputs = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        return add_by_rank(outputs.view(tokens, top_k, -1).float(), weights)


def _by_rows(product: Product, x: Tensor) -> Tensor:
    """Rows of a product are independent up to 128; more are taken 128 at a time."""
    if x.shape[0] <= ROWS:
        return product(x)
    return torch.cat([product(part) for part in x.split(ROWS)])
