"""The parts of the training forward: projections, norms, rope, attention. Batched [B, T, H], with gradients.

Same parameter names and the same math as stoker.backends.network, for autograd and torch.compile instead of paged
caches.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.quantize import straight_through

Rope = tuple[Tensor, Tensor]  # cosines and sines [T, rotary / 2]


class Weights(nn.Module):
    """A module whose named parameters may be used rounded to INT4 (see quantize.train_for_int4)."""

    def __init__(self) -> None:
        super().__init__()
        self.int4_group: dict[str, int] = {}

    def used(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, name)
        group = self.int4_group.get(name)
        return straight_through(weight, group) if group else weight


class Linear(Weights):
    def __init__(self, in_features: int, out_features: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) * std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.used("weight"))


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + w), or * w where `offset` is false (drafter)."""

    def __init__(self, size: int, eps: float, offset: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + self.weight if self.offset else self.weight
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * scale).to(x.dtype)


class SwiGlu(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, std: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_table(positions: Tensor, theta: float, rotary: int) -> Rope:
    exponents = torch.arange(0, rotary, 2, dtype=torch.float32, device=positions.device) / rotary
    angles = positions.float()[..., None] / theta**exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turns dim i with dim i + rotary/2 of x [B, T, heads, D] by tables [T, rotary / 2] or [B, T, rotary / 2]."""
    cos, sin = rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], dim=-1)


@dataclass
class Keys:
    """Keys and values [B, kv_heads, S, D] that later passes may attend to as well."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    def __init__(
        self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, eps: float, gated: bool, std: float
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.gated = heads, kv_heads, head_dim, gated
        self.q_proj = Linear(hidden_size, heads * head_dim * (2 if gated else 1))
        self.k_proj = Linear(hidden_size, kv_heads * head_dim)
        self.v_proj = Linear(hidden_size, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, hidden_size, std)
        self.q_norm = RMSNorm(head_dim, eps, offset=gated)
        self.k_norm = RMSNorm(head_dim, eps, offset=gated)

    def project(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, [B, kv_heads, T, D] each."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        keys = rotate(self.k_norm(self.k_proj(x).view(shape)), rope)
        return keys.transpose(1, 2), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(self, x: Tensor, rope: Rope, seen: Keys | None = None, mask: Tensor | None = None) -> Tensor:
        """Causal over its own tokens; with `seen`, over those keys followed by its own, as `mask` [.., T, S] says."""
        q = self.q_proj(x).view(*x.shape[:-1], self.heads, -1)
        q, gate = q.split(self.head_dim, dim=-1) if self.gated else (q, None)  # per head: query, then gate
        q = rotate(self.q_norm(q), rope).transpose(1, 2)
        keys, values = self.project(x, rope)
        if seen is not None:
            seen.keys.append(keys)
            seen.values.append(values)
            keys, values = torch.cat(seen.keys, dim=2), torch.cat(seen.values, dim=2)
        keys, values = (x.to(q.dtype).repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=mask is None)
        out = out.transpose(1, 2)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2))
