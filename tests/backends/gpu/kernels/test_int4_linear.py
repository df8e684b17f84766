"""The INT4 product against fp64, row by row bit for bit, in Triton's interpreter."""

import re

import pytest
import torch
from torch import Tensor

from stoker.backends.gpu.int4 import PackedInt4, int4_linear, pack_int4

pytest.importorskip("triton")

# (out, in): padded rows, few groups, one group, split over programs, a loop over groups.
SHAPES = [(40, 384), (64, 1024), (32, 128), (32, 4096), (48, 9 * 256)]
BF16_STEP = 2.0**-7  # the interpreter rounds towards zero


def on_disk(*shape: int) -> tuple[Tensor, Tensor]:
    """Random qweight and scales of a weight [.., out, in]."""
    *lead, out, inputs = shape
    qweight = torch.randint(-(2**31), 2**31, (*lead, inputs // 8, out), dtype=torch.int64).int()
    return qweight, (torch.randn(*lead, inputs // 128, out) * 0.02).half()


def weight(*shape: int) -> PackedInt4:
    return pack_int4(*on_disk(*shape))


def close(y: Tensor, expected: Tensor) -> bool:
    return bool(((y.double() - expected).abs() <= BF16_STEP * expected.abs() + 1e-5).all())


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


def test_reference_multiplies_the_dequantised_weight() -> None:
    x, w = torch.randn(5, 384).bfloat16(), weight(40, 384)
    assert close(int4_linear(x, w), x.double() @ w.dequantize().double().t())


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


@pytest.mark.parametrize("shape", [(40, 384), (32, 4096), (48, 9 * 256)])
def test_kernel_matches_fp64(interpreter, shape: tuple[int, int]) -> None:
    interpreter(check_product, *shape)


def test_a_row_does_not_depend_on_its_company(interpreter) -> None:
    interpreter(check_rows, 16, 512, 34)


def test_a_split_row_does_not_depend_on_its_company(interpreter) -> None:
    interpreter(check_rows, 16, 4096, 18)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def test_launch_shape_fixes_the_order_of_the_sum(interpreter) -> None:
    interpreter(check_launch_shapes)


def check_product(out: int, inputs: int) -> None:
    from stoker.backends.gpu.kernels.int4_linear import int4_linear as kernel

    w = weight(out, inputs)
    expected_weight = w.dequantize().double().t()
    for tokens in (3, 9):
        x = torch.randn(tokens, inputs).bfloat16()
        y = kernel(x, w)
        assert y.shape == (tokens, out)
        assert y.dtype == torch.bfloat16
        assert close(y, x.double() @ expected_weight), (out, inputs, tokens)
    assert not w.counters.any(), "counters must be zero after a call"


def check_rows(out: int, inputs: int, rows: int) -> None:
    from stoker.backends.gpu.kernels.int4_linear import int4_linear as kernel

    w = weight(out, inputs)
    # Eighths and powers of two: every partial sum is exact, so numpy's own order of summation cannot show.
    w.scales.copy_(torch.exp2(torch.randint(-6, -2, w.scales.shape)) * torch.randn(w.scales.shape).sign())
    x = (torch.randint(-16, 17, (rows, inputs)) / 8).bfloat16()
    y = kernel(x, w)
    for tokens in (1, 8, 9, 17):
        assert torch.equal(kernel(x[:tokens], w), y[:tokens]), tokens
    order = torch.randperm(rows)
    assert torch.equal(kernel(x[order], w), y[order])
    for row in (0, rows - 1):
        neighbours = torch.full_like(x, 1e30)
        neighbours[row] = x[row]
        assert torch.equal(kernel(neighbours, w)[row], y[row]), row


def check_messages() -> None:
    from stoker.backends.gpu.kernels.int4_linear import int4_linear as kernel

    x, w = torch.randn(4, 256).bfloat16(), weight(32, 256)
    wrong = [
        (x.float(), w, "x must be torch.bfloat16, found torch.float32."),
        (x[:, :128], w, "x must be [tokens, 256], found [4, 128]."),
        (x.repeat(33, 1), w, "x must have 1 to 128 rows, found 132; more belong to prefill."),
        (x[:0], w, "x must have 1 to 128 rows, found 0; more belong to prefill."),
        (x.t().contiguous().t(), w, "x must be contiguous, found strides (1, 4) for [4, 256]."),
        (x, weight(2, 32, 256), "weight.packed must have 4 dimensions, found [2, 2, 2, 16, 32]."),
        (
            x,
            PackedInt4(w.packed, w.scales.float(), w.counters, 32),
            "weight.scales must be torch.float16, found torch.float32.",
        ),
        (
            x,
            PackedInt4(w.packed.to("meta"), w.scales, w.counters, 32),
            "weight.packed must be on cpu like x, found meta.",
        ),
    ]
    for x_, w_, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            kernel(x_, w_)


def check_launch_shapes() -> None:
    from stoker.backends.gpu.kernels.linear import launch_shape

    for rows, inputs in ((20480, 3072), (17408, 3072), (3072, 8192), (64, 3072), (5120, 17408)):
        orders = {
            (shape["SLICES"], shape["SPLIT"], shape["CHUNK"])
            for shape in (launch_shape(tokens, rows, inputs) for tokens in range(1, 129))
        }
        assert len(orders) == 1, (rows, inputs, orders)
