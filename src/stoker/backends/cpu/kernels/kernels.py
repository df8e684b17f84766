"""The operations on packed weights; importing this registers them with the dispatch."""

from collections.abc import Callable
from types import NotImplementedType

import torch
from torch import Tensor

from stoker.backends.cpu.kernels.packed import Packed, PackedExperts
from stoker.backends.cpu.kernels.product import ROWS, SmallProduct
from stoker.backends.cpu.ops.dispatch import register
from stoker.backends.cpu.ops.elementwise import silu, whole_vectors
from stoker.backends.cpu.ops.experts import add_by_rank
from stoker.backends.cpu.ops.linear import Weight
from stoker.backends.family import Family


def linear(x: Tensor, weight: Weight, family: Family, dtype: torch.dtype | None = None) -> Tensor | NotImplementedType:
    """Rows are independent up to 128, and more are taken 128 at a time."""
    if not isinstance(weight, Packed) or x.dtype != torch.bfloat16:
        return NotImplemented
    wanted = dtype or x.dtype
    out = _by_rows(weight.product, x)
    return out if out.dtype == wanted else out.to(wanted)


def gate_linear(x: Tensor, weight: Weight, family: Family) -> Tensor | NotImplementedType:
    if not isinstance(weight, Packed) or x.dtype != torch.bfloat16:
        return NotImplemented
    product = weight.product
    if isinstance(product, SmallProduct):
        return _by_rows(product.filled, x)
    return whole_vectors(_by_rows(product, x).float())


def routed_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Weight, down: Weight, family: Family
) -> Tensor | NotImplementedType:
    if not (isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts)) or x.dtype != torch.bfloat16:
        return NotImplemented
    if gate_up.joined and down.joined:
        return _all_experts(x, experts, weights, gate_up, down)
    return _each_expert(x, experts, weights, gate_up, down)


def _all_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: PackedExperts, down: PackedExperts) -> Tensor:
    """Every expert computes every token; the routing weight, mostly zero, is put on before the last product."""
    share = weights.new_zeros(x.shape[0], gate_up.count).scatter_(1, experts, weights)
    gate, up = _by_rows(gate_up.products[0], x).chunk(2, dim=1)
    active = (silu(gate) * up).view(x.shape[0], gate_up.count, -1).mul_(share[:, :, None])
    return _by_rows(down.products[0], active.flatten(1).to(x.dtype)).float()


def _each_expert(x: Tensor, experts: Tensor, weights: Tensor, gate_up: PackedExperts, down: PackedExperts) -> Tensor:
    """Tokens in the order of their experts; each expert that was chosen computes its own."""
    tokens, top_k = experts.shape
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=gate_up.count).tolist()
    inputs = x.index_select(0, order // top_k).split(counts)
    chosen = [expert for expert, count in enumerate(counts) if count]
    hidden = torch.cat([_by_rows(gate_up.products[e], inputs[e]) for e in chosen]).float()
    gate, up = hidden.chunk(2, dim=1)
    active = silu(gate).mul_(up).to(x.dtype).split(counts)
    sorted_out = torch.cat([_by_rows(down.products[e], active[e]) for e in chosen])
    outputs = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
    return add_by_rank(outputs.view(tokens, top_k, -1).float(), weights)


def _by_rows(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.shape[0] <= ROWS:
        return product(x)
    return torch.cat([product(part) for part in x.split(ROWS)])


register("linear", linear, "cpu")
register("gate_linear", gate_linear, "cpu")
register("routed_experts", routed_experts, "cpu")
