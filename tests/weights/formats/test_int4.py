import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CheckpointError
from stoker.weights.formats.int4 import QZEROS, Int4, pack_nibbles, round_scale, unpack_nibbles

WORDS = [0x76543210, 0xFEDCBA98 - 2**32]  # codes 0..7 and 8..15, least significant nibble first


def tensors(n_in: int = 64, n_out: int = 8, group: int = 32) -> dict[str, torch.Tensor]:
    return {
        "qweight": torch.zeros(n_in // 8, n_out, dtype=torch.int32),
        "scales": torch.ones(n_in // group, n_out, dtype=torch.float16),
        "qzeros": torch.full((n_in // group, n_out // 8), QZEROS, dtype=torch.int32),
    }


def random_weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)) * 0.03


def test_words_hold_eight_inputs_least_significant_first():
    codes = torch.arange(16, dtype=torch.uint8).reshape(16, 1)
    words = pack_nibbles(codes)
    assert words.flatten().tolist() == WORDS
    assert torch.equal(unpack_nibbles(words), codes)


def test_hand_derived_values_with_a_negative_scale():
    given = tensors(n_in=64)
    given["qweight"][:2, 3] = torch.tensor(WORDS, dtype=torch.int32)  # inputs 0..15 of output 3
    given["qweight"][4:6, 3] = torch.tensor(WORDS, dtype=torch.int32)  # inputs 32..47, the second group
    given["scales"][:, 3] = torch.tensor([0.5, -0.25])
    w = Int4.from_tensors(given, "layer").dequantize()
    assert w.shape == (8, 64)
    assert w[3, :16].tolist() == [0.5 * (code - 8) for code in range(16)]
    assert w[3, 32:48].tolist() == [-0.25 * (code - 8) for code in range(16)]
    assert w[0].tolist() == [-8.0] * 64  # code 0, scale 1


@pytest.mark.parametrize("group", [128, 64, 32])
@pytest.mark.parametrize("shape", [(8, 128), (24, 384), (3, 16, 128)])
def test_codes_of_representable_weights_survive(group, shape):
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(-8, 8, shape, generator=generator)
    levels[..., ::group] = -8  # every group uses its full range
    weight = Int4.quantize(levels * 0.125, group=group, clip_search=False)
    assert (weight.name, weight.shape) == (f"int4-g{group}", shape)
    assert torch.equal(weight.dequantize(), levels * 0.125)


def test_expert_dimension_is_each_expert_by_itself():
    w = random_weight(3, 16, 128)
    stacked = Int4.quantize(w)
    for expert in range(3):
        alone = Int4.quantize(w[expert])
        for suffix, tensor in alone.tensors().items():
            assert torch.equal(stacked.tensors()[suffix][expert], tensor)
        assert torch.equal(stacked.dequantize()[expert], alone.dequantize())


def test_extreme_goes_to_minus_eight_whatever_its_sign():
    w = torch.zeros(8, 32)
    w[0, 5], w[1, 6] = 1.0, -1.0
    weight = Int4.quantize(w, group=32, clip_search=False)
    assert weight.scales[0, :2].tolist() == [-0.125, 0.125]
    assert torch.equal(weight.dequantize(), w)


def test_clipping_search_loses_less_in_every_group():
    w = random_weight(64, 256)
    w[:, ::50] *= 6  # outliers are what clipping is for

    def error(weight: Int4) -> torch.Tensor:
        return (weight.dequantize() - w).square().unflatten(-1, (-1, 128)).sum(-1)

    plain, searched = error(Int4.quantize(w, clip_search=False)), error(Int4.quantize(w))
    assert (searched <= plain * (1 + 1e-6)).all()
    assert searched.sum() < 0.95 * plain.sum()


@given(st.floats(-65504, 65504, width=32))
def test_scales_exact_in_fp16_and_bf16(value):
    scale = round_scale(torch.tensor(value), "fp16+bf16")
    assert scale != 0
    if scale.isfinite():  # 65504 itself rounds up to a bf16 beyond fp16, which `quantize` refuses
        assert scale.bfloat16().double() == scale.double()
        assert abs(scale.double() - value) <= abs(value) * 2**-8 + 2**-24


@given(st.floats(-65504, 65504, width=32), st.integers(-8, 7))
def test_with_a_short_scale_every_weight_is_exact_in_bf16(value, code):
    scale = round_scale(torch.tensor(value), "short")
    assert scale != 0
    if scale.isfinite():
        weight = scale.float() * code
        assert torch.equal(weight.bfloat16().float(), weight)
        assert abs(scale.double() - value) <= abs(value) * 2**-5 + 2**-24


def test_short_scales_lose_little_where_the_best_one_is_searched():
    w = random_weight(64, 256)

    def error(q):
        return float((q.dequantize() - w).square().sum())

    assert error(Int4.quantize(w, scale_rounding="short")) < 1.02 * error(Int4.quantize(w))


def test_quantised_scales_are_exact_in_both_types_when_asked():
    w = random_weight(64, 256)
    scales = Int4.quantize(w, scale_rounding="fp16+bf16").scales
    assert torch.equal(scales.bfloat16().float(), scales.float())
    free = Int4.quantize(w).scales
    assert not torch.equal(free.bfloat16().float(), free.float())


def test_zero_rows_and_tiny_groups_stay_finite():
    w = random_weight(16, 128)
    w[3] = 0
    w[4] = 1e-9
    back = Int4.quantize(w).dequantize()
    assert back[3].tolist() == [0.0] * 128
    assert back.isfinite().all()
    assert back[4].abs().max() <= 2**-24


def test_optional_tensors_come_back_as_they_were():
    given = tensors()
    assert set(Int4.from_tensors(given, "layer").tensors()) == {"qweight", "scales", "qzeros"}
    given["g_idx"] = torch.arange(64, dtype=torch.int32) // 32
    assert set(Int4.from_tensors(given, "layer").tensors()) == {"qweight", "scales", "qzeros", "g_idx"}
    del given["qzeros"]
    assert Int4.from_tensors(given, "layer").nbytes == 4 * 8 * 8 + 2 * 2 * 8 + 4 * 64


def broken(**replaced: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**tensors(), **replaced}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (broken(qzeros=torch.full((2, 1), 0x66666666)), "qzeros is I64, expected I32"),
        (broken(qzeros=torch.full((2, 1), 0x66666666, dtype=torch.int32)), "asymmetric INT4"),
        (broken(qzeros=torch.full((2, 1), 0x88888888 - 2**32, dtype=torch.int32)), "gptq_v2"),
        (broken(qzeros=torch.full((2, 2), QZEROS, dtype=torch.int32)), r"shape \[2, 2\], expected \[2, 1\]"),
        (broken(scales=torch.ones(2, 8)), "scales is F32, expected F16"),
        (broken(scales=torch.ones(2, 9, dtype=torch.float16)), r"scales has shape \[2, 9\], expected \[2, 8\]"),
        (broken(scales=torch.ones(3, 8, dtype=torch.float16)), "64 inputs in 3 groups are 21.3333 inputs"),
        (broken(scales=torch.ones(4, 8, dtype=torch.float16)), "16 inputs per group"),
        (broken(scales=torch.full((2, 8), torch.nan, dtype=torch.float16)), "16 of 16 values of scales"),
        (broken(scales=torch.full((2, 8), torch.inf, dtype=torch.float16)), "NaN or Inf"),
        (broken(scales=torch.ones(2, 64, dtype=torch.float16)), "as AWQ does"),
        (broken(g_idx=torch.arange(64, dtype=torch.int32) % 2), "desc_act"),
        (broken(g_idx=torch.arange(32, dtype=torch.int32)), r"g_idx has shape \[32\], expected \[64\]"),
        (broken(weight=torch.ones(8, 64)), "weight F32 .* does not belong beside qweight"),
        ({"qweight": torch.zeros(8, 8, dtype=torch.int32)}, "scales is missing"),
    ],
)
def test_refused_in_one_sentence_that_names_the_layer(given, sentence):
    with pytest.raises(CheckpointError, match=sentence) as error:
        Int4.from_tensors(given, "model.layers.3.mlp.gate_proj")
    assert str(error.value).startswith("model.layers.3.mlp.gate_proj: ")


@pytest.mark.parametrize(
    ("weight", "group", "sentence"),
    [
        (torch.ones(8, 200), 128, "200 inputs do not divide into whole INT4 groups of 128"),
        (torch.ones(12, 128), 128, "12 is no multiple of 8"),
        (torch.ones(8, 128), 16, "128, 64 or 32 inputs, not 16"),
        (torch.full((8, 128), torch.nan), 128, "NaN or Inf"),
        (torch.full((8, 128), 1e7), 128, "the largest weight is 1e\\+07"),
        (torch.ones(128), 128, "float matrix"),
        (torch.ones(8, 128, dtype=torch.int32), 128, "float matrix"),
    ],
)
def test_quantise_refuses_what_it_cannot_hold(weight, group, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        Int4.quantize(weight, group=group)
