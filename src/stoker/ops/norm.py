"""RMS norms over the last dimension. Everything in fp32 with one cast at the end."""

import torch
from torch import Tensor

from stoker.ops.dispatch import operation
from stoker.ops.elementwise import silu

L2_EPS = 1e-6  # inside the square root; not the norm's own epsilon


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """x / rms(x) * (1 + weight) when `offset`, else * weight."""
    scale = 1.0 + weight.float() if offset else weight.float()
    return (_normalize(x, eps) * scale).to(x.dtype)


@operation
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate), per head: x and gate are [T, heads, D], the plain weight is [D]."""
    return (_normalize(x, eps) * weight.float() * silu(gate)).to(gate.dtype)


def l2_norm(x: Tensor) -> Tensor:
    """fp32 x / sqrt(sum(x^2) + 1e-6)."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _normalize(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
