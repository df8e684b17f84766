"""GatedDeltaNet for training: the gated delta rule in chunks of 64, as batched matrix products.

Within a chunk the updates solve a unit lower-triangular system; its inverse is built from 8 x 8 blocks, which a GPU
does far faster than a batched triangular solve and which stays accurate where a plain power series would not (equal
keys make the powers of a 64 x 64 matrix explode).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.weights.model_config import DeltaConfig
from training.layers import Linear

CHUNK, BLOCK = 64, 8
L2_EPS = 1e-6


def invert_unit_lower(strict: Tensor) -> Tensor:
    """(I + strict)^-1 for a strictly lower triangular [.., n, n], n a power-of-two multiple of 8."""
    size = strict.shape[-1]
    eye = torch.eye(BLOCK, dtype=strict.dtype, device=strict.device)
    power = -_pairs(strict, BLOCK, 1)[..., 0, :, 0, :]  # [.., n/8, 8, 8]: 8th power is zero
    inverse = eye + power
    for _ in range(2):
        power = power @ power
        inverse = inverse + inverse @ power
    width = BLOCK
    while width < size:  # [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]]
        corner = _pairs(strict, width, 2)[..., 1, :, 0, :]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        left = torch.cat([first, -second @ corner @ first], dim=-2)
        right = torch.cat([torch.zeros_like(second), second], dim=-2)
        inverse = torch.cat([left, right], dim=-1)
        width *= 2
    return inverse[..., 0, :, :]


def _pairs(matrix: Tensor, width: int, count: int) -> Tensor:
    """The diagonal blocks of width * count, cut into count x count: [.., blocks, count, width, count, width]."""
    blocks = matrix.shape[-1] // (width * count)
    cut = matrix.unflatten(-2, (blocks, count, width)).unflatten(-1, (blocks, count, width))
    return cut.diagonal(dim1=-6, dim2=-3).movedim(-1, -5)


class UnitLowerInverse(torch.autograd.Function):
    """The derivative of an inverse needs the inverse only, so nothing of its making is kept."""

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        inverse = invert_unit_lower(strict)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k [B, T, HV, K] normalised, v [B, T, HV, V], log decay g and beta [B, T, HV], all fp32 -> [B, T, HV, V].

    The state starts at zero. A padded token (g = beta = 0) leaves it as it is.
    """
    length = q.shape[1]
    padding = -length % CHUNK

    def chunks(x: Tensor) -> Tensor:  # [B, HV, C, 64, ...]
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)

    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g, beta))
    total = g.cumsum(-1)  # [B, HV, C, 64]
    since_start = total.exp()[..., None]
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -math.inf).exp()
    k_beta = k * beta[..., None]
    inverse = UnitLowerInverse.apply((k_beta @ k.transpose(-1, -2) * decay).tril(-1))
    own = inverse @ (v * beta[..., None])
    from_state = inverse @ (k_beta * since_start)
    scores = q @ k.transpose(-1, -2) * decay
    q_decayed = q * since_start
    k_to_end = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    whole = since_start[..., -1:, :]  # decay over the chunk

    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for c in range(q.shape[2]):
        change = own[:, :, c] - from_state[:, :, c] @ state
        outputs.append(q_decayed[:, :, c] @ state + scores[:, :, c] @ change)
        state = state * whole[:, :, c] + k_to_end[:, :, c] @ change
    out = torch.stack(outputs, dim=2)  # [B, HV, C, 64, V]
    return out.movedim(1, 3).flatten(1, 2)[:, :length]


class GatedNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed * self.weight * F.silu(gate.float())


class DepthwiseConv(nn.Module):
    """Causal; four shifted products instead of a convolution, so that a compiler can fuse them."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, kernel) / math.sqrt(kernel))

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.weight.shape[-1]
        padded = F.pad(x, (0, 0, kernel - 1, 0))
        taps = [padded[:, i : i + x.shape[1]] * self.weight[:, 0, i] for i in range(kernel)]
        return F.silu(sum(taps[1:], taps[0]))


class GatedDeltaNet(nn.Module):
    def __init__(self, hidden_size: int, delta: DeltaConfig, eps: float, std: float) -> None:
        super().__init__()
        self.delta = delta
        values = delta.value_heads * delta.value_dim
        self.in_proj_qkv = Linear(hidden_size, delta.conv_channels)
        self.in_proj_z = Linear(hidden_size, values)
        self.in_proj_b = Linear(hidden_size, delta.value_heads)
        self.in_proj_a = Linear(hidden_size, delta.value_heads)
        self.conv1d = DepthwiseConv(delta.conv_channels, delta.conv_kernel)
        # heads that remember from one to a thousand tokens: decay rates spread over three powers of ten
        self.A_log = nn.Parameter(torch.log(torch.rand(delta.value_heads) * 15.0 + 1.0))
        rate = torch.exp(torch.rand(delta.value_heads) * math.log(100.0)) * 1e-3
        self.dt_bias = nn.Parameter(rate + torch.log(-torch.expm1(-rate)))
        self.norm = GatedNorm(delta.value_dim, eps)
        self.out_proj = Linear(values, hidden_size, std)

    def forward(self, x: Tensor) -> Tensor:
        delta = self.delta
        qkv = self.conv1d(self.in_proj_qkv(x)).float()
        keys = delta.key_heads * delta.key_dim
        q, k, v = qkv.split([keys, keys, delta.value_heads * delta.value_dim], dim=-1)
        q, k = (l2_norm(y.unflatten(-1, (delta.key_heads, delta.key_dim))) for y in (q, k))
        spread = delta.value_heads // delta.key_heads
        q, k = (y.repeat_interleave(spread, dim=2) for y in (q, k))
        v = v.unflatten(-1, (delta.value_heads, delta.value_dim))
        beta = torch.sigmoid(self.in_proj_b(x).float())
        g = -torch.exp(self.A_log) * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            out = delta_rule(q * delta.key_dim**-0.5, k, v, g, beta)
        z = self.in_proj_z(x).unflatten(-1, (delta.value_heads, delta.value_dim))
        return self.out_proj(self.norm(out, z).flatten(-2))


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
