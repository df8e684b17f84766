"""Rotary position embedding on the first `rotary_dim` dimensions of each head, half-split pairing, fp32 angles.

For text the three position rows of mrope are equal, so plain rope results.
"""

from functools import lru_cache

import torch
from torch import Tensor

from stoker.backends.network.ops.norm import rms_norm


@lru_cache
def _inverse_frequencies(theta: float, rotary_dim: int, device: torch.device) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    return 1.0 / theta**exponents


def rope_table(positions: Tensor, theta: float, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """fp32 cosines and sines [T, rotary_dim / 2] of integer positions [T]."""
    angles = positions.float()[:, None] * _inverse_frequencies(theta, rotary_dim, positions.device)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dim i with dim i + rotary_dim/2 of x [T, heads, D]; the dims past rotary_dim pass through."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def head_norm_rope(q: Tensor, k: Tensor, scales: Tensor, eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, heads, D] and keys [T, kv_heads, D], each head normalised, times its row of scales [heads +
    kv_heads, D], then rotated."""
    both = rotate(rms_norm(torch.cat([q, k], dim=1), scales, eps, False), cos, sin)
    queries, keys = both.split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    return queries, keys
