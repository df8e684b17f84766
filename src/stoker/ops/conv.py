"""Depthwise causal convolution over a few tokens, with the last inputs of each sequence as state."""

import torch
from torch import Tensor

from stoker.ops.dispatch import operation
from stoker.ops.elementwise import silu


@operation
def causal_conv(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, taps: Tensor, tail: Tensor) -> Tensor:
    """silu(conv(x)) for x [T, C] and weight [C, W]; the last tap multiplies the current token.

    state [slots, W - 1, C] holds the inputs before this batch and is advanced in place. `taps` [T, W] and `tail`
    [B, W - 1] index the rows of cat(state[slots], x): inputs of each token, and the inputs to keep.
    """
    carried = state[slots].to(x.dtype)  # [B, W - 1, C]
    inputs = torch.cat([carried.flatten(0, 1), x])
    out = inputs[taps[:, 0]].float() * weight[:, 0].float()
    for tap in range(1, weight.shape[1]):
        out = out + inputs[taps[:, tap]].float() * weight[:, tap].float()
    state[slots] = inputs[tail].to(state.dtype)
    return silu(out).to(x.dtype)
