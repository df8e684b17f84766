"""INT4 weights laid out for the step kernels keep every value."""

import re

import pytest
import torch
from torch import Tensor

from stoker.backends.gpu.int4 import PackedInt4, pack_int4

SHAPES = [(40, 384), (64, 1024), (32, 128)]  # (out, in): padded rows, few groups, one group


def on_disk(*shape: int) -> tuple[Tensor, Tensor]:
    """Random qweight and scales of a weight [.., out, in]."""
    *lead, out, inputs = shape
    qweight = torch.randint(-(2**31), 2**31, (*lead, inputs // 8, out), dtype=torch.int64).int()
    return qweight, (torch.randn(*lead, inputs // 128, out) * 0.02).half()


def weight(*shape: int) -> PackedInt4:
    return pack_int4(*on_disk(*shape))


@pytest.mark.parametrize("shape", [*SHAPES, (3, 24, 256)])
def test_packing_keeps_every_weight(shape: tuple[int, ...]) -> None:
    qweight, scales = on_disk(*shape)
    packed = pack_int4(qweight, scales)
    i = torch.arange(shape[-1])
    nibbles = qweight[..., i // 8, :] >> 4 * (i % 8)[:, None] & 0xF  # [.., in, out]
    expected = (scales[..., i // 128, :].float() * (nibbles - 8)).transpose(-1, -2)
    assert torch.equal(packed.dequantize(), expected)
    assert packed.rows % 32 == 0
    assert (packed.out_features, packed.in_features) == shape[-2:]


def test_experts_are_indexed_like_dense_weights() -> None:
    packed = weight(5, 32, 256)
    chosen = torch.tensor([3, 0, 3])
    assert torch.equal(packed[chosen].dequantize(), packed.dequantize()[chosen])
    assert torch.equal(packed[1].dequantize(), packed.dequantize()[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, s: (q.long(), s),
            "qweight must be torch.int32 with 2 or more dimensions, found torch.int64 [32, 64].",
        ),
        (
            lambda q, s: (q, s.float()),
            "scales must be torch.float16 with 2 or more dimensions, found torch.float32 [2, 64].",
        ),
        (lambda q, s: (q[:24], s), "qweight has 24 words of 8 inputs: 192 inputs are no multiple of 128."),
        (lambda q, s: (q, s[:1]), "scales must be [2, 64] for a qweight of [32, 64], found [1, 64]."),
    ],
)
def test_packing_names_what_is_wrong(change, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_int4(*change(*on_disk(64, 256)))
