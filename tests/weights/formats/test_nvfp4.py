import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CheckpointError
from stoker.weights.formats.nvfp4 import E2M1, Nvfp4, Nvfp4ModelOpt, round_e2m1, unpack_e2m1

# Low nibbles are codes 0..7 (even inputs), high nibbles codes 8..15 (odd inputs).
BYTES = torch.tensor([[0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]], dtype=torch.uint8)
VALUES = [[0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0, 6.0, -6.0]]
SCALE = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
Form = type[Nvfp4] | type[Nvfp4ModelOpt]
both_forms = pytest.mark.parametrize("form", [Nvfp4, Nvfp4ModelOpt])


def random_weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(11)) * 0.03


def test_low_nibble_is_the_even_input():
    assert unpack_e2m1(BYTES).tolist() == VALUES


def test_compressed_tensors_global_scale_divides():
    given = {"weight_packed": BYTES, "weight_scale": SCALE, "weight_global_scale": torch.tensor([8.0])}
    weight = Nvfp4.from_tensors(given, "layer")
    assert (weight.name, weight.shape, weight.nbytes) == ("nvfp4-ct", (1, 16), 8 + 1 + 4)
    assert weight.dequantize().tolist() == [[v / 4 for v in VALUES[0]]]


def test_modelopt_second_scale_multiplies():
    given = {"weight": BYTES, "weight_scale": SCALE, "weight_scale_2": torch.tensor(8.0)}
    weight = Nvfp4ModelOpt.from_tensors(given, "layer")
    assert (weight.name, weight.shape) == ("nvfp4-modelopt", (1, 16))
    assert weight.dequantize().tolist() == [[v * 16 for v in VALUES[0]]]


@given(st.floats(-8, 8, width=32))
def test_rounds_to_the_nearest_and_ties_to_the_even_code(x):
    code = int(round_e2m1(torch.tensor([x])))
    distances = [abs(abs(x) - value) for value in E2M1]
    nearest = [c for c, d in enumerate(distances) if d == min(distances)]
    assert code & 7 == (nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))
    assert (code >> 3) == (x < 0)


def test_midpoints_by_hand():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0, -2.5])
    assert round_e2m1(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8 + 4]


@both_forms
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (2, 5, 64)])
def test_quantises_within_half_a_step(form: Form, shape):
    w = random_weight(*shape)
    weight = form.from_tensors(form.quantize(w).tensors(), "layer")
    assert weight.shape == shape
    group_amax = w.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    error = (weight.dequantize() - w).abs().unflatten(-1, (-1, 16))
    # The widest step is 2 of 6; the E4M3 scale itself is off by up to 1/16, or by half its smallest step.
    assert (error <= group_amax * (1 / 6 + 1 / 16) + w.abs().max() / 448 * 2**-9).all()


@both_forms
def test_exact_where_the_weight_is_representable(form: Form):
    generator = torch.Generator().manual_seed(2)
    w = torch.tensor(E2M1)[torch.randint(0, 8, (4, 64), generator=generator)]
    w[:, ::16] = 6.0
    assert torch.equal(form.quantize(w).dequantize().round(decimals=4), w)


@both_forms
def test_zero_rows_and_zero_tensors(form: Form):
    w = random_weight(4, 32)
    w[2] = 0
    assert form.quantize(w).dequantize()[2].tolist() == [0.0] * 32
    zeros = form.from_tensors(form.quantize(torch.zeros(4, 32)).tensors(), "layer")
    assert torch.equal(zeros.dequantize(), torch.zeros(4, 32))


@both_forms
def test_a_group_tiny_beside_the_largest_weight_keeps_what_it_can(form: Form):
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16] = 2688.0, 0.005  # the second group's scale, 0.005 / 6, would round to 0 in E4M3
    assert form.quantize(w).dequantize()[0, 16].item() == pytest.approx(3 * 2**-9)


@both_forms
def test_each_expert_has_its_own_global_scale(form: Form):
    w = random_weight(3, 8, 32) * torch.tensor([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    assert torch.equal(form.quantize(w).dequantize()[1], form.quantize(w[1]).dequantize())


def test_input_scales_are_kept_as_they_are():
    given = {"weight_packed": BYTES, "weight_scale": SCALE, "weight_global_scale": torch.tensor([8.0])}
    given["input_global_scale"] = torch.tensor([3.0])
    assert Nvfp4.from_tensors(given, "layer").tensors()["input_global_scale"].item() == 3.0


def ct(**replaced: torch.Tensor) -> dict[str, torch.Tensor]:
    given = {"weight_packed": BYTES, "weight_scale": SCALE, "weight_global_scale": torch.tensor([8.0])}
    return {**given, **replaced}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (ct(weight_global_scale=torch.tensor([0.0])), "weight_global_scale is 0"),
        (ct(weight_global_scale=torch.tensor([torch.inf])), "weight_global_scale are NaN or Inf"),
        (ct(weight_global_scale=torch.ones(2)), r"shape \[2\], expected \[\] or \[1\]"),
        (ct(weight_scale=torch.tensor([[torch.nan]]).to(torch.float8_e4m3fn)), "1 of 1 values of weight_scale"),
        (ct(weight_scale=torch.ones(1, 1)), "weight_scale is F32, expected F8_E4M3"),
        (ct(weight_packed=BYTES[:, :6]), "holds 12 inputs, not whole NVFP4 groups of 16"),
        (ct(weight_packed=BYTES.repeat(1, 2)), r"weight_scale has shape \[1, 1\], expected \[1, 2\]"),
        (ct(weight_scale_2=torch.tensor(1.0)), "weight_scale_2 F32 .* does not belong"),
    ],
)
def test_refused_in_one_sentence(given, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        Nvfp4.from_tensors(given, "layer")


@both_forms
def test_rows_that_are_no_whole_groups_are_not_quantised(form: Form):
    with pytest.raises(CheckpointError, match="40 inputs do not divide into whole NVFP4 groups of 16"):
        form.quantize(torch.ones(4, 40))
