"""Blocks of weights times rows, with the processor's instruction for pairs and without."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.cpu.kernels import pairs, strips
from stoker.backends.cpu.ops.linear import Weight, as_tensor
from stoker.backends.cpu.pack import pack
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.nvfp4 import Nvfp4

WEIGHTS: dict[str, Callable[[], tuple[Weight, ...]]] = {
    "int4": lambda: (Int4.quantize(torch.randn(128, 256)),),
    "int4 in groups of 32": lambda: (Int4.quantize(torch.randn(64, 96), group=32),),
    "two int4 as one": lambda: tuple(Int4.quantize(torch.randn(n, 128)) for n in (72, 120)),
    "int8": lambda: (Int8Row.quantize(torch.randn(320, 208)),),
    "fp8": lambda: tuple(Fp8Block.quantize(0.02 * torch.randn(n, 384)) for n in (64, 192)),
    "fp8 with scales of any size": lambda: (_scaled_oddly(Fp8Block.quantize(torch.randn(64, 256))),),
    "bf16": lambda: (torch.randn(192, 144).bfloat16(),),
    "int4 and bf16 that holds it": lambda: (
        Int4.quantize(torch.randn(64, 128), scale_rounding="short"),
        torch.randn(64, 128).bfloat16(),
    ),
}


multiplier = cache(pairs.make_multiply)


def _scaled_oddly(weight: Fp8Block) -> Fp8Block:
    return Fp8Block(weight.weight, weight.weight_scale_inv.float() * 1.2345)


def product(weight: pairs.Blocks, x: Tensor, dots: bool) -> Tensor:
    """By the kernel that was made for these rows, block by block."""
    multiply = multiplier(weight.kind, dots)
    rows = x if dots else x.float()
    out = []
    for block in range(weight.outputs // strips.BLOCK):
        sums = torch.zeros(len(x), strips.BLOCK)
        multiply(
            rows.data_ptr(), rows.stride(0) * rows.element_size(), len(x), weight.inputs, weight.group,
            weight.codes[block].data_ptr(), weight.scales[block].data_ptr(), sums.data_ptr(),
        )  # fmt: skip
        out.append(sums)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("dots", sorted({False, pairs.DOTS}))
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_those_of_fp32_and_a_row_is_the_same_beside_any_others(name: str, dots: bool) -> None:
    torch.manual_seed(0)
    weights = WEIGHTS[name]()
    blocks = pairs.Blocks.of(*weights)
    assert blocks is not None
    dense = torch.cat([as_tensor(weight).double() for weight in weights])
    assert (blocks.outputs, blocks.inputs) == tuple(dense.shape)
    x = torch.randn(14, dense.shape[1]).bfloat16()
    found = product(blocks, x, dots)
    wanted = x.double() @ dense.t()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
    for count in range(1, 14):
        assert torch.equal(product(blocks, x[14 - count :], dots), found[14 - count :])


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_are_those_of_the_checkpoint(name: str) -> None:
    weights = WEIGHTS[name]()
    blocks = pairs.Blocks.of(*weights)
    assert blocks is not None
    dense = torch.cat([as_tensor(weight).float() for weight in weights])
    ones = torch.eye(dense.shape[1], dtype=torch.bfloat16)[:128]
    assert torch.equal(product(blocks, ones, pairs.DOTS), dense.t()[:128])


def test_rows_may_be_part_of_wider_ones_or_lie_across() -> None:
    weight = torch.randn(64, 128).bfloat16()
    rows = torch.randn(5, 300).bfloat16()
    multiply = pack(weight, blocks=True)
    assert multiply.blocks
    wanted = multiply.product(rows[:, 7:135].contiguous())
    assert torch.equal(multiply.product(rows[:, 7:135]), wanted)
    assert torch.equal(multiply.product(rows.t().contiguous().t()[:, 7:135]), wanted)


def test_what_is_not_taken() -> None:
    """Values that neither form holds, outputs that fill no block, groups that fill no strip."""
    assert pairs.Blocks.of(torch.randn(64, 64)) is None
    assert pairs.Blocks.of(Nvfp4.quantize(torch.randn(64, 64))) is None
    assert pairs.Blocks.of(torch.zeros(65, 64)) is None
    assert pairs.Blocks.of(torch.zeros(64, 40)) is None
    assert pairs.Blocks.of(Int4.quantize(torch.randn(64, 128)), Int4.quantize(torch.randn(64, 128), group=32)) is None


WITHOUT = """
import llvmlite.binding as binding
import torch
features = binding.get_host_cpu_features()
features.update(dict.fromkeys(MISSING, False))
binding.get_host_cpu_features = lambda: features
from stoker.backends.cpu.pack import pack
from stoker.backends.cpu.kernels import enable, pairs
from stoker.weights.formats.int4 import Int4
assert not pairs.DOTS
assert enable._experts_hold() and enable._attention_holds()
weight = Int4.quantize(torch.randn(192, 256))
packed = pack(weight, blocks=True)
assert packed.blocks
x = torch.randn(20, 256).bfloat16()
torch.testing.assert_close(packed.product(x), x.float() @ weight.dequantize().t(), rtol=1e-4, atol=1e-4)
"""


@pytest.mark.parametrize("missing", [("avx512bf16",), ("avx512bf16", "avx512f")])
def test_products_on_a_processor_without_the_instruction_or_without_as_many_registers(
    missing: tuple[str, ...], tmp_path: Path
) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    program = f"MISSING = {missing}\n{WITHOUT}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
