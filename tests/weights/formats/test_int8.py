import pytest
import torch

from stoker.errors import CheckpointError
from stoker.weights.formats.int8 import Int8Row


def test_hand_derived_values_with_a_negative_scale():
    given = {
        "weight": torch.tensor([[127, -64, 0], [1, -128, 3]], dtype=torch.int8),
        "weight_scale": torch.tensor([[0.5], [-2.0]]),
    }
    weight = Int8Row.from_tensors(given, "lm_head")
    assert (weight.name, weight.shape, weight.nbytes) == ("int8-row", (2, 3), 6 + 8)
    assert weight.dequantize().tolist() == [[63.5, -32.0, 0.0], [-2.0, 256.0, -6.0]]


def test_one_scale_per_row_without_the_trailing_dimension():
    given = {
        "weight": torch.ones(2, 3, dtype=torch.int8),
        "weight_scale": torch.tensor([1.0, 2.0]).bfloat16(),
    }
    weight = Int8Row.from_tensors(given, "lm_head")
    assert weight.dequantize().tolist() == [[1.0] * 3, [2.0] * 3]
    assert weight.tensors()["weight_scale"].shape == (2,)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 33, 65)])
def test_rounds_each_row_within_half_a_step(shape):
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    w[..., 0, :] = 0
    weight = Int8Row.quantize(w)
    assert weight.weight.min() >= -127
    back = Int8Row.from_tensors(weight.tensors(), "lm_head").dequantize()
    assert (back[..., 0, :] == 0).all()
    assert ((back - w).abs() <= w.abs().amax(-1, keepdim=True) / 127 * 0.501).all()


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (torch.ones(3, 1), r"weight_scale has shape \[3, 1\], expected \[2, 1\] or \[2\]"),
        (torch.tensor([1.0, torch.inf]), r"1 of 2 values of weight_scale are NaN or Inf, the first at \[1\]"),
        (torch.ones(2, dtype=torch.int32), "weight_scale is I32"),
    ],
)
def test_refused_in_one_sentence(scale, sentence):
    with pytest.raises(CheckpointError, match=f"^lm_head: .*{sentence}"):
        Int8Row.from_tensors({"weight": torch.ones(2, 3, dtype=torch.int8), "weight_scale": scale}, "lm_head")
