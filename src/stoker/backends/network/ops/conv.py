"""Depthwise causal convolution over a few tokens."""

from torch import Tensor

from stoker.backends.network.ops.elementwise import silu


def causal_conv(inputs: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    """silu(conv) for each row of `taps` [T, W], which names its inputs among the rows of inputs [N, C], oldest first.

    weight is [W, C] fp32; the last tap multiplies the current token.
    """
    out = inputs[taps[:, 0]].float() * weight[0]
    for tap in range(1, weight.shape[0]):
        out = out + inputs[taps[:, tap]].float() * weight[tap]
    return silu(out).to(inputs.dtype)
