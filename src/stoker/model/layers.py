"""Projections and norms as modules: they own parameters and call the ops."""

import torch
from torch import Tensor, nn

from stoker.ops.elementwise import swiglu
from stoker.ops.family import Family
from stoker.ops.linear import Weight, linear
from stoker.ops.norm import rms_norm


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An inference parameter, uninitialised; `dtype` overrides the model's own where the facts demand fp32."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x @ W^T without bias; weight [out, in], plain or in a storage format."""

    weight: Weight

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features)

    def forward(self, x: Tensor, family: Family) -> Tensor:
        return linear(x, self.weight, family)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


class DenseMlp(nn.Module):
    """down(silu(gate x) * (up x)): dense layers, shared experts, drafter layers."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor, family: Family) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x, family), self.up_proj(x, family)), family)
