"""RMS norms over the last dimension. Everything in fp32 with one cast at the end.

The mean of a row and its negative side by side is zero, so torch's layer norm of both is the RMS norm of the first:
one fused kernel in place of eight small ones, which on a CPU is most of what a norm costs.
"""

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.backends.network.elementwise import silu
from stoker.backends.network.linear import parameter

L2_EPS = 1e-6  # inside the square root; not the norm's own epsilon


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = parameter(size)
        self.eps, self.offset = eps, offset
        self._kept: tuple[Tensor, Tensor] | None = None

    def scale(self) -> Tensor:
        """What is multiplied with, in fp32, the offset added, twice in a row [2 D]; made once."""
        if self._kept is None or self._kept[0] is not self.weight:
            scale = 1.0 + self.weight.float() if self.offset else self.weight.float()
            self._kept = self.weight, twice(scale)
        return self._kept[1]

    def forward(self, x: Tensor) -> Tensor:
        return scaled_rms_norm(x, self.scale(), self.eps)


def scaled_rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) * scale, which is fp32 and comes twice in a row, [2 D]."""
    size = x.shape[-1]
    return functional.layer_norm(torch.cat([x, -x], dim=-1), (2 * size,), scale, None, eps).narrow(-1, 0, size)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate), per head: x and gate are [T, heads, D], the plain fp32 weight is [D]."""
    return (scaled_rms_norm(x.float(), twice(weight), eps) * silu(gate)).to(gate.dtype)


def l2_norm(x: Tensor) -> Tensor:
    """fp32 x / sqrt(sum(x^2) + 1e-6)."""
    size = x.shape[-1]
    return scaled_rms_norm(x.float(), _inverse_root(size, x.device), L2_EPS / size)


def twice(scale: Tensor) -> Tensor:
    return torch.cat([scale, scale])


@lru_cache
def _inverse_root(size: int, device: torch.device) -> Tensor:
    """1 / sqrt(size), which turns a root mean square into a norm; twice in a row."""
    with torch.inference_mode(False):
        return torch.full((2 * size,), size**-0.5, device=device)
