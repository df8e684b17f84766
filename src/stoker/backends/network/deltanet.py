"""GatedDeltaNet: causal conv, gated delta rule, gated norm."""

import torch
from torch import Tensor, nn

from stoker.backends.family import Family
from stoker.backends.network.linear import Fused, FusedGates, Linear, parameter
from stoker.backends.network.ops.deltanet import DeltaConstants, DeltaState, gated_delta
from stoker.backends.network.ops.elementwise import whole_vectors
from stoker.backends.network.recurrence import Plan
from stoker.weights.model_config import DeltaConfig


class GatedNorm(nn.Module):
    """Plain weight, kept in fp32 as published."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=torch.float32)
        self.eps = eps


class DepthwiseConv(nn.Module):
    """Weight [C, 1, kernel], the published shape."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = parameter(channels, 1, kernel)


class GatedDeltaNet(nn.Module):
    def __init__(self, hidden_size: int, delta: DeltaConfig, eps: float) -> None:
        super().__init__()
        self.delta = delta
        values = delta.value_heads * delta.value_dim
        self.in_proj_qkv = Linear(hidden_size, delta.conv_channels)  # rows: q, then k, then v
        self.in_proj_z = Linear(hidden_size, values)
        self.in_proj_b = Linear(hidden_size, delta.value_heads)
        self.in_proj_a = Linear(hidden_size, delta.value_heads)
        self.conv1d = DepthwiseConv(delta.conv_channels, delta.conv_kernel)
        self.A_log = parameter(delta.value_heads, dtype=torch.float32)
        self.dt_bias = parameter(delta.value_heads)
        self.norm = GatedNorm(delta.value_dim, eps)
        self.out_proj = Linear(values, hidden_size)
        self.inputs, self.outputs = Fused(self.in_proj_qkv, self.in_proj_z), Fused(self.out_proj)
        self.gates = FusedGates(self.in_proj_a, self.in_proj_b)
        self._kept: tuple[Tensor, DeltaConstants] | None = None

    def forward(self, x: Tensor, state: DeltaState, plan: Plan, family: Family) -> Tensor:
        qkv, z = self.inputs(x, family)
        gates = self.gates.joined(x, family)  # a, then b: [T, 2 HV or more]
        return self.outputs(gated_delta(qkv, z, gates, self._constants(), state, plan), family)[0]

    def _constants(self) -> DeltaConstants:
        """Made once."""
        if self._kept is None or self._kept[0] is not self.conv1d.weight:
            weight = self.conv1d.weight
            bias = whole_vectors(torch.cat([self.dt_bias.float(), torch.zeros_like(self.A_log)]))
            conv = weight[:, 0].t().float().contiguous()
            self._kept = weight, DeltaConstants(-torch.exp(self.A_log), bias, conv, self.norm.weight, self.norm.eps)
        return self._kept[1]
