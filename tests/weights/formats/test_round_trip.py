"""Through a real safetensors file and back: every bit the same, and the header alone names the format."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker.weights.formats import FORMATS, format_class
from stoker.weights.formats.base import DTYPE_NAMES, WeightFormat
from stoker.weights.formats.fp8 import Fp8Block, Fp8Tensor
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.nvfp4 import Nvfp4, Nvfp4ModelOpt
from stoker.weights.formats.plain import Plain
from stoker.weights.formats.rules import formats_in
from tests.support.situations import fp8_row, pack_quantized


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9)) * 0.05


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # a scalar has no dimension to view as bytes


EXAMPLES: dict[str, WeightFormat] = {
    "bf16": Plain(weight(5, 7).bfloat16()),
    "fp16": Plain(weight(3, 5, 7).half()),
    "fp32": Plain(weight(9)),
    "int4-g128": Int4.quantize(weight(24, 384)),
    "int4-g64": Int4.quantize(weight(8, 64), group=64),
    "int4-g32": Int4.quantize(weight(16, 96), group=32, scale_rounding="fp16+bf16"),
    "int4-ct-g128": pack_quantized(weight(24, 384), 128),
    "int4-ct-g64": pack_quantized(weight(24, 384), 64),
    "int4-ct-g32": pack_quantized(weight(3, 96), 32),
    "int4-ct-row": pack_quantized(weight(3, 96), None),
    "int8-row": Int8Row.quantize(weight(11, 13)),
    "fp8-b128": Fp8Block.quantize(weight(130, 257)),
    "fp8-row": fp8_row(weight(3, 5)),
    "fp8-tensor": Fp8Tensor(weight(3, 5).to(torch.float8_e4m3fn), torch.tensor(0.3), torch.tensor(0.1)),
    "nvfp4-ct": Nvfp4.quantize(weight(3, 48)),
    "nvfp4-modelopt": Nvfp4ModelOpt.quantize(weight(3, 48)),
}


def test_every_format_has_an_example():
    assert list(EXAMPLES) == list(FORMATS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_write_read_dequantise(name, tmp_path):
    written = EXAMPLES[name]
    save_file({f"model.layer.{s}": t for s, t in written.tensors().items()}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")

    header = {tensor: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for tensor, t in loaded.items()}
    found = formats_in(header).layers["model.layer"]
    assert (found.format, found.shape, found.nbytes) == (name, written.shape, written.nbytes)

    read = format_class(found.format).from_tensors(
        {suffix: loaded[tensor] for suffix, tensor in found.tensors.items()}, "model.layer"
    )
    assert (read.name, read.shape, read.nbytes) == (name, written.shape, written.nbytes)
    for suffix, tensor in written.tensors().items():
        assert torch.equal(bits(read.tensors()[suffix]), bits(tensor)), suffix
    assert torch.equal(read.dequantize(), written.dequantize())
    assert read.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", EXAMPLES)
def test_shapes_can_be_checked_without_values(name):
    meta = {suffix: t.to("meta") for suffix, t in EXAMPLES[name].tensors().items()}
    assert format_class(name).from_tensors(meta, "layer").shape == EXAMPLES[name].shape
