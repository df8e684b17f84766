"""Mixture of experts with an optional shared expert behind a sigmoid gate: routing, and the chosen experts' SwiGLU,
added up in a fixed order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stoker.backends.family import Family
from stoker.backends.network.elementwise import sigmoid, silu, swiglu
from stoker.backends.network.linear import DenseMlp, FusedGates, Linear, Weight, as_tensor, linear, parameter
from stoker.backends.network.packing.products import Product, by_rows
from stoker.weights.model_config import MoeConfig


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
        gate, up = by_rows(self.gate_up[0], x).chunk(2, dim=1)
        active = (silu(gate) * up).view(x.shape[0], self.count, -1).mul_(share[:, :, None])
        return by_rows(self.down[0], active.flatten(1).to(x.dtype)).float()

    def _each(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens in the order of their experts; each expert that was chosen computes its own."""
        tokens, top_k = experts.shape
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.count).tolist()
        inputs = x.index_select(0, order // top_k).split(counts)
        chosen = [expert for expert, count in enumerate(counts) if count]
        hidden = torch.cat([by_rows(self.gate_up[e], inputs[e]) for e in chosen]).float()
        gate, up = hidden.chunk(2, dim=1)
        active = silu(gate).mul_(up).to(x.dtype).split(counts)
        sorted_out = torch.cat([by_rows(self.down[e], active[e]) for e in chosen])
        outputs = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        return add_by_rank(outputs.view(tokens, top_k, -1).float(), weights)


class Experts(nn.Module):
    """Routed experts, fused: gate_up_proj [E, 2I, H] with the gate rows first, down_proj [E, H, I]."""

    gate_up_proj: Weight
    down_proj: Weight
    packed: PackedExperts | None

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.gate_up_proj = parameter(moe.num_experts, 2 * moe.intermediate_size, hidden_size)
        self.down_proj = parameter(moe.num_experts, hidden_size, moe.intermediate_size)

    def __setattr__(self, name: str, value: Any) -> None:
        """A new weight ends the use of what was packed from the old one."""
        super().__setattr__(name, value)
        if name in ("gate_up_proj", "down_proj"):
            self.packed = None

    @property
    def nbytes(self) -> int:
        return self.gate_up_proj.nbytes + self.down_proj.nbytes

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor, family: Family) -> Tensor:
        """The sum over each token's experts `chosen` [T, top_k], times their `weights` -> [T, H] fp32."""
        if self.packed is not None:
            return self.packed(x, chosen, weights)
        return routed_experts(x, chosen, weights, self.gate_up_proj, self.down_proj, family)


class SparseMlp(nn.Module):
    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        self.routed: Tensor | None = None  # [T, top_k] experts of the last forward, for whoever counts them
        self.gate = Linear(hidden_size, moe.num_experts)
        self.experts = Experts(hidden_size, moe)
        self.routing = FusedGates(self.gate)
        if moe.shared_intermediate_size:
            self.shared_expert = DenseMlp(hidden_size, moe.shared_intermediate_size)
            self.shared_expert_gate = Linear(hidden_size, 1)
            self.routing = FusedGates(self.gate, self.shared_expert_gate)

    def forward(self, x: Tensor, family: Family) -> Tensor:
        """-> [T, H] fp32."""
        moe = self.moe
        logits = self.routing.joined(x, family)  # [T, E], and the shared expert's gate behind
        chosen, weights = route(logits.narrow(1, 0, moe.num_experts), moe.top_k, moe.renormalize)
        self.routed = chosen
        out = self.experts(x, chosen, weights, family)
        if moe.shared_intermediate_size:
            gate = logits.narrow(1, moe.num_experts, 1)
            out = torch.addcmul(out, self.shared_expert(x, family), sigmoid(gate))
        return out


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
