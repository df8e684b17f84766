"""Weights in operand order keep every value of their format."""

import re

import pytest
import torch

from stoker.backends.gpu.packed import (
    Kind,
    PackedWeight,
    join_rows,
    pack_bf16,
    pack_fp8,
    pack_int4,
    pack_int8,
    pack_nvfp4,
)
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.nvfp4 import Nvfp4


def pack_int4_codes(codes: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
    """codes [.., out, in] in 0..15, zero point 8; scales [.., in/128, out] fp16."""
    nibbles = codes.long().transpose(-1, -2).unflatten(-2, (-1, 8))  # [.., in/8, 8, out]
    return pack_int4((nibbles << 4 * torch.arange(8)[:, None]).sum(-2).int(), scales)


def packed(kind: Kind, *shape: int) -> tuple[PackedWeight, torch.Tensor]:
    """A random weight in operand order, and its values."""
    w = torch.randn(shape) * 0.1
    match kind:
        case Kind.BF16:
            return pack_bf16(w.bfloat16()), w.bfloat16().float()
        case Kind.FP8:
            fp8 = Fp8Block.quantize(w)
            return pack_fp8(fp8.weight, fp8.weight_scale_inv), fp8.dequantize()
        case Kind.INT8:
            int8 = Int8Row.quantize(w)
            return pack_int8(int8.weight, int8.weight_scale), int8.dequantize()
        case Kind.NVFP4:
            nvfp4 = Nvfp4.quantize(w)
            factor = (1.0 / nvfp4.weight_global_scale).expand(shape[:-1])
            return pack_nvfp4(nvfp4.weight_packed, nvfp4.weight_scale, factor), nvfp4.dequantize()
        case Kind.INT4:
            codes = torch.randint(0, 16, shape)
            scales = (torch.randn(*shape[:-2], shape[-1] // 128, shape[-2]) * 0.02).half()
            spread = scales.float().transpose(-1, -2).repeat_interleave(128, -1)
            return pack_int4_codes(codes, scales), (codes - 8) * spread


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("shape", [(40, 384), (3, 32, 256)])
def test_packing_keeps_every_value(kind: Kind, shape: tuple[int, ...]) -> None:
    weight, values = packed(kind, *shape)
    # NVFP4's reference divides by the global scale, here one multiplies by its inverse: a rounding apart
    torch.testing.assert_close(weight.dequantize(), values, rtol=1e-6 if kind is Kind.NVFP4 else 0.0, atol=0.0)
    assert (weight.out_features, weight.in_features, weight.rows % 32) == (*shape[-2:], 0)
    assert weight.packed.shape[-3] == kind.tiles


@pytest.mark.parametrize("kind", Kind)
def test_experts_are_indexed_like_dense_weights(kind: Kind) -> None:
    weight, _ = packed(kind, 5, 32, 128)
    chosen = torch.tensor([3, 0, 3])
    assert torch.equal(weight[chosen].dequantize(), weight.dequantize()[chosen])


@pytest.mark.parametrize("kind", Kind)
def test_joined_weights_lie_one_above_the_other(kind: Kind) -> None:
    parts = [packed(kind, rows, 256)[0] for rows in (64, 32, 8)]
    joined = join_rows(*parts)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_bytes_are_counted_once() -> None:
    assert pack_bf16(torch.zeros(32, 128).bfloat16()).nbytes == 32 * 128 * 2
    assert packed(Kind.INT4, 32, 128)[0].nbytes == 32 * 128 // 2 + 32 * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_bf16(torch.zeros(32, 128)), "weight must be torch.bfloat16 with 2 or more dimensions"),
        (
            lambda: pack_bf16(torch.zeros(32, 100).bfloat16()),
            "the weight has 100 inputs, which are no multiple of 128.",
        ),
        (
            lambda: pack_fp8(torch.zeros(32, 256).to(torch.float8_e4m3fn), torch.zeros(2, 1)),
            "scale must be [1, 2] for a weight of [32, 256], found [2, 1].",
        ),
        (
            lambda: join_rows(packed(Kind.BF16, 40, 128)[0], packed(Kind.BF16, 32, 128)[0]),
            "parts must have a multiple of 32 rows, found [40, 32].",
        ),
        (
            lambda: join_rows(packed(Kind.BF16, 32, 128)[0], packed(Kind.INT8, 32, 128)[0]),
            "weights to join must be of one format, found BF16 and INT8.",
        ),
    ],
)
def test_packing_names_what_is_wrong(call, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def on_disk(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random qweight and scales of a weight [.., out, in]."""
    *lead, out, inputs = shape
    qweight = torch.randint(-(2**31), 2**31, (*lead, inputs // 8, out), dtype=torch.int64).int()
    return qweight, (torch.randn(*lead, inputs // 128, out) * 0.02).half()


@pytest.mark.parametrize("shape", [(40, 384), (64, 1024), (32, 128), (3, 24, 256)])
def test_int4_is_packed_from_the_layout_on_disk(shape: tuple[int, ...]) -> None:
    qweight, scales = on_disk(*shape)
    packed = pack_int4(qweight, scales)
    i = torch.arange(shape[-1])
    nibbles = qweight[..., i // 8, :] >> 4 * (i % 8)[:, None] & 0xF  # [.., in, out]
    expected = (scales[..., i // 128, :].float() * (nibbles - 8)).transpose(-1, -2)
    assert torch.equal(packed.dequantize(), expected)
    assert packed.rows % 32 == 0
    assert (packed.out_features, packed.in_features) == shape[-2:]


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
def test_packing_int4_names_what_is_wrong(change, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pack_int4(*change(*on_disk(64, 256)))
