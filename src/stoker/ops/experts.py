"""Mixture of experts: routing, and the chosen experts' SwiGLU with a weighted sum in a fixed order."""

import torch
from torch import Tensor

from stoker.ops.dispatch import operation
from stoker.ops.elementwise import swiglu
from stoker.ops.family import Family
from stoker.ops.linear import linear


@operation
def route(x: Tensor, gate: Tensor, top_k: int, renormalize: bool, family: Family) -> tuple[Tensor, Tensor]:
    """Experts [T, top_k] by falling probability, and their fp32 weights. Softmax over all experts comes first."""
    probabilities = torch.softmax(linear(x.float(), gate.float(), family), dim=-1)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


@operation
def routed_experts(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, family: Family
) -> Tensor:
    """Sum over a token's experts of weight * down(silu(gate x) * (up x)), fp32 [T, H], added in order of rank.

    gate_up [E, 2I, H] holds the gate rows first, down is [E, H, I].
    """
    pairs = _one_by_one if family is Family.STEP else _grouped
    outputs = pairs(x, experts, gate_up, down).float()  # [T, top_k, H]
    total = outputs[:, 0] * weights[:, 0, None]
    for rank in range(1, experts.shape[1]):
        total = total + outputs[:, rank] * weights[:, rank, None]
    return total


def _one_by_one(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every (token, expert) pair is a matrix-vector product of its own: no loop over experts, any batch size."""
    tokens, top_k = experts.shape
    chosen = experts.flatten()
    inputs = x.repeat_interleave(top_k, dim=0).to(gate_up.dtype)[:, :, None]  # [T * top_k, H, 1]
    gate, up = torch.bmm(gate_up[chosen], inputs)[:, :, 0].chunk(2, dim=-1)
    out = torch.bmm(down[chosen], swiglu(gate, up)[:, :, None])
    return out.view(tokens, top_k, -1)


def _grouped(x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One tiled matmul per expert over all tokens that chose it."""
    tokens, top_k = experts.shape
    out = x.new_empty(tokens * top_k, x.shape[1], dtype=gate_up.dtype)
    chosen = experts.flatten()
    for expert in chosen.unique().tolist():
        pairs = (chosen == expert).nonzero()[:, 0]
        inputs = x[pairs // top_k]
        gate, up = linear(inputs, gate_up[expert], Family.PREFILL).chunk(2, dim=-1)
        out[pairs] = linear(swiglu(gate, up), down[expert], Family.PREFILL)
    return out.view(tokens, top_k, -1)
