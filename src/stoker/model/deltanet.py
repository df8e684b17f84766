"""GatedDeltaNet: causal conv, gated delta rule, gated norm."""

import torch
from torch import Tensor, nn

from stoker.model.config import DeltaConfig
from stoker.model.layers import Fused, FusedGates, Linear, parameter
from stoker.model.recurrence import Plan
from stoker.ops.deltanet import DeltaState, StepPlan, commit, deltanet_chunks, deltanet_steps
from stoker.ops.elementwise import sigmoid, softplus, whole_vectors
from stoker.ops.family import Family
from stoker.ops.norm import gated_rms_norm


class GatedNorm(nn.Module):
    """Plain weight, kept in fp32 as published."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """fp32 x -> the dtype of the gate."""
        return gated_rms_norm(x, gate, self.weight, self.eps)


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
        self._kept: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] | None = None

    def forward(self, x: Tensor, state: DeltaState, plan: Plan, family: Family) -> Tensor:
        heads = self.delta.value_heads
        qkv, z = self.inputs(x, family)
        decay, bias, weight = self._constants()
        both = self.gates.joined(x, family)  # a, then b: [T, 2 HV or more]
        g = softplus(both + bias).narrow(1, 0, heads) * decay  # log decay
        gates = torch.stack([g, sigmoid(both).narrow(1, heads, heads)], dim=1)
        commit(state, plan.commits)
        if isinstance(plan, StepPlan):
            out = deltanet_steps(qkv, gates, weight, state, plan)
        else:
            out = deltanet_chunks(qkv, gates, weight, state, plan)
        z = z.view(-1, heads, self.delta.value_dim)
        return self.outputs(self.norm(out, z).flatten(1), family)[0]

    def _constants(self) -> tuple[Tensor, Tensor, Tensor]:
        """-exp(A) [HV], the bias of a as wide as the gates, and the conv's weight [W, C], in fp32; made once."""
        if self._kept is None or self._kept[0] is not self.conv1d.weight:
            weight = self.conv1d.weight
            bias = whole_vectors(torch.cat([self.dt_bias.float(), torch.zeros_like(self.A_log)]))
            self._kept = weight, (-torch.exp(self.A_log), bias, weight[:, 0].t().float().contiguous())
        return self._kept[1]
