"""Mixture of experts for training: top-k routing with a load-balancing loss, and two ways to run the experts.

`grouped` sorts (token, expert) pairs and multiplies only those; `dense` runs every expert on every token and zeroes
the rest, which costs more arithmetic and no gathering. Both give the same numbers; the faster one depends on the GPU.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.weights.model_config import MoeConfig
from training.layers import Linear, SwiGlu, Weights

Dispatch = Literal["grouped", "dense"]


class Experts(Weights):
    """Fused as published: gate_up_proj [E, 2I, H] with the gate rows first, down_proj [E, H, I]."""

    def __init__(self, hidden_size: int, moe: MoeConfig, std: float) -> None:
        super().__init__()
        count, width = moe.num_experts, moe.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * width, hidden_size) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(count, hidden_size, width) * std)

    def dense(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [N, H], weights [N, E], zero where an expert was not chosen -> [N, H]."""
        both = torch.einsum("nh,eih->nei", x, self.used("gate_up_proj"))
        gate, up = both.chunk(2, dim=-1)
        inner = F.silu(gate) * up * weights[..., None].to(gate.dtype)
        return torch.einsum("nei,ehi->nh", inner, self.used("down_proj"))

    def grouped(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, H], chosen and weights [N, k] -> [N, H]."""
        top_k = chosen.shape[1]
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), len(self.gate_up_proj)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        inputs = x.to(dtype).index_select(0, order // top_k)
        both = F.grouped_mm(inputs, self.used("gate_up_proj").to(dtype).transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.used("down_proj").to(dtype).transpose(1, 2), offs=ends)
        back = out.index_select(0, order.argsort()).view(len(x), top_k, -1)
        return (back * weights[..., None].to(dtype)).sum(1)


class SparseMlp(nn.Module):
    def __init__(self, hidden_size: int, moe: MoeConfig, std: float, dispatch: Dispatch) -> None:
        super().__init__()
        self.moe, self.dispatch = moe, dispatch
        self.gate = Linear(hidden_size, moe.num_experts)
        self.experts = Experts(hidden_size, moe, std)
        self.shared_expert = SwiGlu(hidden_size, moe.shared_intermediate_size, std)
        self.shared_expert_gate = Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> output [B, T, H] and the balancing loss, 1 when all experts get the same share."""
        flat = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):  # routing in fp32, as at inference
            probabilities = torch.softmax(self.gate(flat.float()), dim=-1)
        weights, chosen = probabilities.topk(self.moe.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        took = torch.zeros_like(probabilities).scatter(1, chosen, 1.0)
        share = took.mean(0) / self.moe.top_k
        balance = self.moe.num_experts * (share * probabilities.mean(0)).sum()
        if self.dispatch == "dense":
            routed = self.experts.dense(flat, torch.zeros_like(probabilities).scatter(1, chosen, weights))
        else:
            routed = self.experts.grouped(flat, chosen, weights)
        shared = self.shared_expert(flat) * torch.sigmoid(self.shared_expert_gate(flat))
        return (routed + shared).view(x.shape), balance
