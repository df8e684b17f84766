"""Depthwise causal convolution over a few tokens."""

import torch
from torch import Tensor

from stoker.ops.elementwise import silu


def causal_conv(x: Tensor, weight: Tensor, carried: Tensor, taps: Tensor) -> Tensor:
    """silu(conv(x)) for x [T, C] and weight [C, W]; the last tap multiplies the current token.

    `carried` [B, W - 1, C] are the inputs of each sequence before this batch. `taps` [T, W] names the inputs of each
    token, as rows of cat(carried, x).
    """
    inputs = torch.cat([carried.to(x.dtype).flatten(0, 1), x])
    out = inputs[taps[:, 0]].float() * weight[:, 0].float()
    for tap in range(1, weight.shape[1]):
        out = out + inputs[taps[:, tap]].float() * weight[:, tap].float()
    return silu(out).to(x.dtype)
