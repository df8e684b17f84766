"""Choosing the next token. Sampling is argmax(log p + G) with noise G that depends on seed, position and token alone.

So a seed reproduces whatever else runs beside it, and a drafter that adds the same noise guesses the same token.
"""

import torch
from torch import Tensor

_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # splitmix64, as signed


def sample(logits: Tensor, temperature: float, seed: int, position: int) -> int:
    """One token id from logits [vocab]; temperature 0 is greedy, ties go to the lowest id."""
    if temperature == 0.0:
        return int(logits.argmax())
    return int((logits.double() / temperature + gumbel(logits.shape[0], seed, position)).argmax())


def gumbel(vocab_size: int, seed: int, position: int) -> Tensor:
    """fp64 Gumbel noise [vocab]: -log(-log u), u from a counter-based generator."""
    tokens = torch.arange(vocab_size)
    stream = _mix(_mix(torch.tensor(seed)) + position)
    bits = (_mix(stream + tokens) >> 12) & ((1 << 52) - 1)  # 52 uniform bits
    uniform = (bits.double() + 0.5) * 2.0**-52  # never 0 or 1
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """splitmix64's output function on int64, which wraps around like uint64."""
    x = x * _GOLDEN + _GOLDEN
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
