"""Projections of every format and what surrounds them, in Triton's interpreter: against fp64, bit for bit by row."""

import re

import pytest
import torch
from torch import Tensor

from stoker.backends.gpu.packed import Kind, PackedWeight, pack_bf16, pack_fp8, pack_int8, pack_nvfp4
from tests.backends.gpu.test_packed import pack_int4_codes, packed

pytest.importorskip("triton")


@pytest.mark.parametrize("kind", Kind)
def test_kernel_matches_fp64(interpreter, kind: Kind) -> None:
    interpreter(check_product, kind, 40, 384)


@pytest.mark.parametrize("kind", [Kind.FP8, Kind.INT8, Kind.NVFP4])
def test_every_code_has_its_value(interpreter, kind: Kind) -> None:
    interpreter(check_codes, kind)


@pytest.mark.parametrize(
    ("kind", "out", "inputs"), [(Kind.FP8, 32, 4096), (Kind.INT4, 32, 4096), (Kind.INT4, 48, 9 * 256)]
)
def test_split_and_looped_inputs_match_fp64(interpreter, kind: Kind, out: int, inputs: int) -> None:
    """Over programs that share a row's inputs, and over more groups than one program has in straight-line code."""
    interpreter(check_product, kind, out, inputs)


@pytest.mark.parametrize("kind", Kind)
def test_a_row_does_not_depend_on_its_company(interpreter, kind: Kind) -> None:
    interpreter(check_rows, kind, 256)


def test_a_split_row_does_not_depend_on_its_company(interpreter) -> None:
    interpreter(check_rows, Kind.INT4, 4096)


def test_norm_is_applied_to_the_sum(interpreter) -> None:
    interpreter(check_norm)


def test_stream_takes_the_sum_and_is_prepared_for_the_next_norm(interpreter) -> None:
    interpreter(check_stream)


def test_head_finds_the_best_token(interpreter) -> None:
    interpreter(check_best)


def test_kernel_names_what_is_wrong(interpreter) -> None:
    interpreter(check_messages)


def test_order_of_the_sum_follows_the_weight_alone(interpreter) -> None:
    interpreter(check_launch_shapes)


def product(x: Tensor, weight: PackedWeight, norm: object = None) -> Tensor:
    from stoker.backends.gpu.kernels.launch import Workspace
    from stoker.backends.gpu.kernels.linear import Norm, linear

    assert norm is None or isinstance(norm, Norm)
    workspace = Workspace.allocate(2 * x.shape[0] * weight.rows, weight.rows, "cpu")
    y = torch.full((x.shape[0], weight.out_features), torch.nan)
    linear(x, weight, y, workspace, norm)
    assert not workspace.counters.any(), "counters must be zero after a launch"
    return y


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_product(kind: Kind, out: int, inputs: int) -> None:
    weight, _ = packed(kind, out, inputs)
    for tokens in (1, 9):
        x = torch.randn(tokens, inputs).bfloat16()
        assert error(product(x, weight), x.double() @ weight.dequantize().double().t()) < 1e-6, tokens


def exact(kind: Kind, out: int, inputs: int) -> PackedWeight:
    """Small whole numbers and powers of two: every sum is exact, so numpy's own order of summation cannot show."""
    codes = torch.randint(-7, 8, (out, inputs))
    powers = torch.exp2(torch.randint(-6, -2, (out,)))
    match kind:
        case Kind.BF16:
            return pack_bf16((codes / 8).bfloat16())
        case Kind.INT8:
            return pack_int8(codes.to(torch.int8), powers)
        case Kind.FP8:
            return pack_fp8(codes.float().to(torch.float8_e4m3fn), torch.full((1, inputs // 128), 0.25))
        case Kind.INT4:
            return pack_int4_codes(codes + 8, powers.half().expand(inputs // 128, out))
        case Kind.NVFP4:
            scale = torch.exp2(torch.randint(-3, 3, (out, inputs // 16))).to(torch.float8_e4m3fn)
            return pack_nvfp4(torch.randint(0, 256, (out, inputs // 2), dtype=torch.uint8), scale, powers)


def check_codes(kind: Kind) -> None:
    """Row r is made of code r; subnormals are the rare ones. One input is 1, so the result is the value itself."""
    code = torch.arange(256)
    match kind:
        case Kind.FP8:
            code[127], code[255] = 0, 0  # NaN
            raw = code.to(torch.uint8)[:, None].expand(256, 128).contiguous().view(torch.float8_e4m3fn)
            weight = pack_fp8(raw, torch.ones(2, 1))
        case Kind.INT8:
            weight = pack_int8((code - 128).to(torch.int8)[:, None].expand(256, 128).contiguous(), torch.ones(256))
        case _:  # every nibble beside every scale that is no NaN
            nibbles = (code % 16 * 17).to(torch.uint8)[:, None].expand(256, 64).contiguous()
            scale = (code // 2 % 127).to(torch.uint8)[:, None].expand(256, 8).contiguous()
            weight = pack_nvfp4(nibbles, scale.view(torch.float8_e4m3fn), torch.ones(256))
    expected = weight.dequantize()
    for place in (0, 41, 127):
        x = torch.zeros(1, 128).bfloat16()
        x[0, place] = 1.0
        assert torch.equal(product(x, weight)[0], expected[:, place]), place


def check_rows(kind: Kind, inputs: int) -> None:
    weight = exact(kind, 32, inputs)
    x = (torch.randint(-16, 17, (20, inputs)) / 8).bfloat16()
    y = product(x, weight)
    order = torch.randperm(20)
    assert torch.equal(product(x[order], weight), y[order])
    for tokens in (1, 8, 9, 17):
        assert torch.equal(product(x[:tokens], weight), y[:tokens]), tokens
    company = torch.full_like(x, 1e30)
    company[13] = x[13]
    assert torch.equal(product(company, weight)[13], y[13])


def check_norm() -> None:
    from stoker.backends.gpu.kernels.linear import Norm

    weight = exact(Kind.BF16, 40, 384)
    x, scale = (torch.randint(-16, 17, (9, 384)) / 8).bfloat16(), torch.exp2(torch.randint(-2, 3, (384,)))
    scaled = (x.float() * scale).bfloat16()
    squares = x.float().square().view(9, 24, 16).sum(-1)
    y = product(scaled, weight, Norm(squares, 1e-6))
    normed = scaled.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert error(y, normed @ weight.dequantize().double().t()) < 1e-6
    assert torch.equal(product(scaled[3:4], weight, Norm(squares[3:4], 1e-6))[0], y[3])


def check_stream() -> None:
    from stoker.backends.gpu.kernels.launch import Workspace
    from stoker.backends.gpu.kernels.linear import Stream, linear

    for inputs in (384, 4096):  # whole, and split over programs
        weight, _ = packed(Kind.INT4, 64, inputs)
        x, before, scale = torch.randn(9, inputs).bfloat16(), torch.randn(9, 64).bfloat16(), torch.rand(64)
        stream = Stream(before.clone(), scale, torch.empty(9, 64).bfloat16())
        linear(x, weight, stream, Workspace.allocate(2 * 9 * 64, 64, "cpu"))
        expected = before.double() + x.double() @ weight.dequantize().double().t()
        assert error(stream.x, expected) < 2.0**-7  # the interpreter rounds towards zero
        assert error(stream.scaled, stream.x.float() * scale) < 2.0**-7


def check_best() -> None:
    from stoker.backends.gpu.kernels.launch import Workspace
    from stoker.backends.gpu.kernels.linear import Best, linear
    from stoker.backends.gpu.kernels.rows import best_tokens

    weight, _ = packed(Kind.INT8, 1064, 128)
    x = torch.randn(9, 128).bfloat16()
    units = weight.rows // 16
    best = Best(torch.empty(9, units), torch.empty(9, units, dtype=torch.int32), torch.full((9, 1064), torch.nan))
    tokens = torch.full((9,), -1, dtype=torch.int32)
    linear(x, weight, best, Workspace.allocate(1, 1, "cpu"))
    best_tokens(best, 1064, tokens)
    assert best.logits is not None
    assert error(best.logits, x.double() @ weight.dequantize().double().t()) < 1e-6
    assert torch.equal(tokens.long(), best.logits.argmax(-1))
    best.values[2], best.rows[2] = 0.0, torch.arange(units, dtype=torch.int32) * 16 + 5  # all alike: the lowest
    best.values[3] = torch.nan
    best_tokens(best, 1064, tokens)
    assert tokens[2] == 5
    assert tokens[3] == 1063, "a row of NaN must name some token of the vocabulary"


def check_messages() -> None:
    from stoker.backends.gpu.kernels.launch import Workspace
    from stoker.backends.gpu.kernels.linear import Best, Norm, Stream, linear

    weight, _ = packed(Kind.BF16, 32, 128)
    x, y, space = torch.randn(4, 128).bfloat16(), torch.empty(4, 32), Workspace.allocate(1, 1, "cpu")
    deep, _ = packed(Kind.INT4, 32, 4096)
    half = torch.empty(4, 32).bfloat16()
    wrong = [
        (lambda: linear(x.float(), weight, y, space), "x must be torch.bfloat16, found torch.float32."),
        (lambda: linear(x[:, :64], weight, y, space), "x must be [tokens, 128], found [4, 64]."),
        (
            lambda: linear(x.repeat(33, 1), weight, y, space),
            "x must have 1 to 128 rows, found 132; more belong to prefill.",
        ),
        (lambda: linear(x[:0], weight, y, space), "x must have 1 to 128 rows, found 0; more belong to prefill."),
        (
            lambda: linear(x.t().contiguous().t(), weight, y, space),
            "x must be contiguous, found strides (1, 4) for [4, 128].",
        ),
        (lambda: linear(x, weight, y[:3], space), "out must be [4, 32], found [3, 32]."),
        (
            lambda: linear(x, weight, y.half(), space),
            "out must be torch.bfloat16 or torch.float32, found torch.float16.",
        ),
        (
            lambda: linear(x, weight, y, space, Norm(torch.ones(3, 8), 1e-6)),
            "squares must be [4, 8], found [3, 8].",
        ),
        (
            lambda: linear(x, weight, Stream(half, torch.ones(31), half), space),
            "stream.next_scale must be [32], found [31].",
        ),
        (
            lambda: linear(x, weight, Best(torch.empty(4, 3), torch.empty(4, 2).int()), space),
            "best.values must be [4, 2], found [4, 3].",
        ),
        (
            lambda: linear(torch.randn(4, 4096).bfloat16(), deep, y, space),
            "the workspace has 1 partial sums and 1 counters, this launch needs 256 and 2.",
        ),
        (
            lambda: linear(x, packed(Kind.BF16, 2, 32, 128)[0], y, space),
            "weight.packed must be [2, 1, 4, 16, 32], found [2, 2, 1, 4, 16, 32].",
        ),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def check_launch_shapes() -> None:
    from stoker.backends.gpu.kernels.linear import launch_shape

    for kind in Kind:
        for rows, inputs in ((20608, 3072), (3072, 8192), (64, 3072), (248320, 3072), (3072, 6144)):
            shapes = [launch_shape(tokens, rows, inputs, kind) for tokens in range(1, 129)]
            assert len({(s["SLICES"], s["SPLIT"]) for s in shapes}) == 1, (kind, rows, inputs)
