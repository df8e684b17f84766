"""RMS norm with a weight."""

from torch import Tensor, nn

from stoker.backends.network.linear import parameter
from stoker.backends.network.ops.norm import scaled_rms_norm, twice


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
