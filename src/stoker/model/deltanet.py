"""GatedDeltaNet: causal conv, gated delta rule, gated norm."""

import torch
from torch import Tensor, nn

from stoker.model.batch import Batch
from stoker.model.config import DeltaConfig
from stoker.model.layers import Linear, parameter
from stoker.ops.deltanet import DeltaState, commit, deltanet_chunks, deltanet_steps
from stoker.ops.elementwise import sigmoid, softplus
from stoker.ops.family import Family
from stoker.ops.norm import gated_rms_norm

ConvInputs = tuple[Tensor, Tensor]  # see Batch.conv_inputs


class GatedNorm(nn.Module):
    """Plain weight, kept in fp32 as published."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
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

    def forward(self, x: Tensor, batch: Batch, state: DeltaState, conv: ConvInputs) -> Tensor:
        delta, family = self.delta, batch.family
        qkv = self.in_proj_qkv(x, family)
        z = self.in_proj_z(x, family).view(-1, delta.value_heads, delta.value_dim)
        beta = sigmoid(self.in_proj_b(x, family))  # [T, HV]
        step = softplus(self.in_proj_a(x, family).float() + self.dt_bias.float())
        g = -torch.exp(self.A_log) * step  # log decay, [T, HV]
        taps, tail = conv
        weight = self.conv1d.weight[:, 0]
        commit(state, batch.slots, batch.replay)
        if family is Family.STEP:
            out = deltanet_steps(qkv, g, beta, weight, state, batch.slots, taps, batch.step_rows)
        else:
            out = deltanet_chunks(qkv, g, beta, weight, state, batch.slots, taps, tail, batch.chunk_rows)
        return self.out_proj(self.norm(out.to(x.dtype), z).flatten(1), family)
