"""Mixture of experts: routing, and the chosen experts' SwiGLU with a weighted sum in a fixed order."""

import torch
from torch import Tensor

from stoker.backends.family import Family
from stoker.backends.network.ops.elementwise import swiglu
from stoker.backends.network.ops.linear import Weight, as_tensor, linear


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """From fp32 router logits [T, E]: experts [T, top_k] by falling probability, and their weights. Softmax over all
    experts comes first."""
    weights, experts = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


def routed_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Weight, down: Weight, family: Family
) -> Tensor:
    """Sum over a token's experts of weight * down(silu(gate x) * (up x)), fp32 [T, H], added in order of rank.

    gate_up [E, 2I, H] holds the gate rows first, down is [E, H, I].
    """
    pairs = _one_by_one if family is Family.STEP else _grouped
    return add_by_rank(pairs(x, experts, gate_up, down).float(), weights)


def add_by_rank(outputs: Tensor, weights: Tensor) -> Tensor:
    """fp32 outputs [T, top_k, H] weighted and added in order of rank."""
    total = outputs[:, 0] * weights[:, 0, None]
    for rank in range(1, weights.shape[1]):
        total = total + outputs[:, rank] * weights[:, rank, None]
    return total


def _one_by_one(x: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Every (token, expert) pair is a matrix-vector product of its own: no loop over experts, any batch size."""
    tokens, top_k = experts.shape
    chosen = experts.flatten()
    inputs = x.repeat_interleave(top_k, dim=0)
    gate, up = _matvec(gate_up[chosen], inputs).chunk(2, dim=-1)
    return _matvec(down[chosen], swiglu(gate, up).to(x.dtype)).view(tokens, top_k, -1)


def _matvec(weight: Weight, x: Tensor) -> Tensor:
    """[n, out, in] x [n, in] -> [n, out] in the dtype of the weight; fp32 where that is quantised."""
    dense = as_tensor(weight)
    return torch.bmm(dense, x.to(dense.dtype)[:, :, None])[:, :, 0]


def _grouped(x: Tensor, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """One tiled matmul per expert over all tokens that chose it."""
    tokens, top_k = experts.shape
    out = x.new_empty(tokens * top_k, x.shape[1])
    chosen = experts.flatten()
    for expert in chosen.unique().tolist():
        pairs = (chosen == expert).nonzero()[:, 0]
        gate, up = linear(x[pairs // top_k], gate_up[expert], Family.PREFILL).chunk(2, dim=-1)
        out[pairs] = linear(swiglu(gate, up), down[expert], Family.PREFILL)
    return out.view(tokens, top_k, -1)
