"""Mixture of experts with an optional shared expert behind a sigmoid gate."""

from typing import Any

import torch
from torch import Tensor, nn

from stoker.backends.family import Family
from stoker.backends.network.linear import DenseMlp, FusedGates, Linear, parameter
from stoker.backends.network.ops.elementwise import sigmoid
from stoker.backends.network.ops.experts import route, routed_experts
from stoker.backends.network.ops.linear import Weight
from stoker.backends.network.packing.packed import PackedExperts
from stoker.weights.model_config import MoeConfig


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
