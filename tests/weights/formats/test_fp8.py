import pytest
import torch

from stoker.errors import CheckpointError
from stoker.weights.formats.fp8 import Fp8Block, Fp8Tensor

# Byte -> value by hand: 1 sign, 4 exponent (bias 7) and 3 mantissa bits.
E4M3 = {0x00: 0.0, 0x01: 2.0**-9, 0x30: 0.5, 0x38: 1.0, 0x3C: 1.5, 0x40: 2.0, 0x7E: 448.0, 0xBC: -1.5}


def bytes_as_fp8(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)


def random_weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)) * 0.03


def test_every_hand_derived_byte():
    weight = Fp8Tensor(weight=bytes_as_fp8(list(E4M3)), weight_scale=torch.tensor(1.0))
    assert weight.dequantize().tolist() == [list(E4M3.values())]


def test_each_block_has_its_own_scale_and_edge_blocks_are_short():
    ones = torch.ones(130, 257).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, -6.0]], dtype=torch.bfloat16)
    weight = Fp8Block.from_tensors({"weight": ones, "weight_scale_inv": scale}, "layer")
    w = weight.dequantize()
    assert (weight.name, w.shape) == ("fp8-b128", (130, 257))
    assert w[127, [0, 127, 128, 255, 256]].tolist() == [1, 1, 2, 2, 3]
    assert w[128, [0, 127, 128, 255, 256]].tolist() == [4, 4, 5, 5, -6]


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 128), (64, 3072), (2, 130, 200)])
def test_rounds_within_half_a_step(shape, scale_dtype):
    w = random_weight(*shape)
    weight = Fp8Block.quantize(w, scale_dtype=scale_dtype)
    assert weight.weight_scale_inv.dtype == scale_dtype
    assert Fp8Block.from_tensors(weight.tensors(), "layer").shape == shape
    scale = w.abs().max() / 448
    # 4 significant bits, plus what a scale rounded down clips off the largest value, plus the subnormal step
    assert ((weight.dequantize() - w).abs() <= w.abs() * (2**-4 + 2**-8) + scale * 2**-9).all()


@pytest.mark.parametrize(("largest", "scale"), [(448.0, 1.0), (448.5, 2.0), (224.0, 0.5), (448 * 2.0**-100, 2.0**-100)])
def test_the_scale_is_the_smallest_power_of_two_that_holds_the_block(largest, scale):
    weight = Fp8Block.quantize(torch.full((128, 128), largest))
    assert weight.weight_scale_inv.item() == scale
    assert weight.dequantize().unique().item() == pytest.approx(largest, rel=2**-4)


def test_every_weight_is_exact_in_bf16():
    w = Fp8Block.quantize(random_weight(256, 384)).dequantize()
    assert torch.equal(w.bfloat16().float(), w)


def test_a_power_of_two_loses_next_to_nothing():
    """Against the scale that puts the largest value on 448 exactly."""
    w = random_weight(128, 128)
    exact = w.abs().max() / 448
    best = (w / exact).to(torch.float8_e4m3fn).float() * exact
    assert (Fp8Block.quantize(w).dequantize() - w).norm() <= 1.05 * (best - w).norm()


def test_largest_value_never_becomes_nan_when_the_scale_is_too_small_for_its_type():
    weight = Fp8Block.quantize(torch.full((128, 128), 448 * 2.0**-40), scale_dtype=torch.float16)
    assert weight.dequantize().isfinite().all()


def test_blocks_of_zeros():
    w = random_weight(256, 256)
    w[:128, 128:] = 0
    weight = Fp8Block.quantize(w)
    assert weight.weight_scale_inv[0, 1] == 1
    assert (weight.dequantize()[:128, 128:] == 0).all()


def test_experts_are_blocked_one_by_one():
    w = random_weight(3, 130, 140)
    stacked = Fp8Block.quantize(w)
    assert torch.equal(stacked.dequantize()[2], Fp8Block.quantize(w[2]).dequantize())


@pytest.mark.parametrize("scalar", [torch.tensor(-0.5), torch.tensor([-0.5])])
def test_modelopt_scalar_in_both_shapes(scalar):
    given = {
        "weight": bytes_as_fp8([0x38, 0x3C]),
        "weight_scale": scalar,
        "input_scale": torch.tensor(0.01),
    }
    weight = Fp8Tensor.from_tensors(given, "layer")
    assert weight.name == "fp8-tensor"
    assert weight.dequantize().tolist() == [[-0.5, -0.75]]
    assert weight.tensors()["weight_scale"].shape == scalar.shape
    assert "input_scale" in weight.tensors()


BYTES = torch.zeros(130, 200, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"weight": BYTES}, "weight_scale_inv is missing"),
        (
            {"weight": BYTES, "weight_scale_inv": torch.ones(2, 1)},
            r"weight_scale_inv has shape \[2, 1\], expected \[2, 2\]",
        ),
        ({"weight": BYTES.float(), "weight_scale_inv": torch.ones(2, 2)}, "weight is F32, expected F8_E4M3"),
        ({"weight": BYTES, "weight_scale_inv": torch.tensor([[1, torch.nan], [1, 1]])}, r"first at \[0, 1\]"),
        ({"weight": BYTES, "weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, "is I32, expected BF16"),
        ({"weight": BYTES[0], "weight_scale_inv": torch.ones(2)}, "expected a matrix"),
    ],
)
def test_refused_in_one_sentence(given, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        Fp8Block.from_tensors(given, "layer")


def test_infinite_scalar_refused():
    with pytest.raises(CheckpointError, match="weight_scale are NaN or Inf"):
        Fp8Tensor.from_tensors({"weight": BYTES, "weight_scale": torch.tensor(torch.inf)}, "layer")


def test_nan_weight_is_not_quantised():
    with pytest.raises(CheckpointError, match="NaN or Inf, which FP8 cannot"):
        Fp8Block.quantize(torch.full((8, 8), torch.nan))
