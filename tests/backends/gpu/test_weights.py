"""compressed-tensors weights in the order of the GPU kernels: exact, or refused with what to use instead."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.weights.formats.base import WeightFormat
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int4_ct import Int4Ct
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.nvfp4 import Nvfp4
from tests.support.situations import fp8_row, pack_quantized

WEIGHT = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.mark.parametrize("group", [128, None])
def test_compressed_tensors_int4_is_packed_without_loss(group: int | None) -> None:
    from stoker.backends.gpu.weights import pack

    stored = pack_quantized(WEIGHT, group)
    laid_out = stored.in_gptq_order()
    assert laid_out is not None
    assert torch.equal(pack([laid_out]).dequantize(), stored.dequantize())


def test_scales_that_fp16_cannot_hold_are_kept_and_refused_by_name() -> None:
    from stoker.backends.gpu.weights import pack

    stored = pack_quantized(WEIGHT, 128)
    tiny = Int4Ct(stored.weight_packed, torch.full_like(stored.weight_scale, 1.1e-7))
    assert tiny.in_gptq_order() is None
    with pytest.raises(ConfigError, match="scales that fp16 cannot hold: use an AutoRound or GPTQ release"):
        pack([tiny])


def test_fp8_per_row_is_refused_with_what_to_use() -> None:
    from stoker.backends.gpu.weights import pack

    with pytest.raises(ConfigError, match=r"one per row: use .* weight_block_size \[128, 128\]"):
        pack([fp8_row(WEIGHT)])


def without_memory(weight: Tensor | WeightFormat) -> Tensor | WeightFormat:
    if isinstance(weight, Tensor):
        return weight.to("meta")
    return replace(weight, **{name: tensor.to("meta") for name, tensor in weight.tensors().items()})


@pytest.mark.parametrize("kind", [Tensor, Int4, Fp8Block, Int8Row, Nvfp4])
@pytest.mark.parametrize("shapes", [[(96, 256)], [(128, 256), (160, 256)], [(4, 64, 128)]])
def test_packing_without_memory_gives_the_sizes_of_packing_with_it(kind: Any, shapes: list[tuple[int, ...]]) -> None:
    from stoker.backends.gpu.weights import pack

    make = Tensor.bfloat16 if kind is Tensor else kind.quantize
    weights = [make(torch.randn(shape)) for shape in shapes]
    real, counted = pack(weights), pack([without_memory(weight) for weight in weights])
    assert (counted.kind, counted.out_features) == (real.kind, real.out_features)
    for name in ("packed", "scales", "row_scales"):
        ours, theirs = getattr(counted, name), getattr(real, name)
        assert (ours.shape, ours.dtype, ours.is_meta) == (theirs.shape, theirs.dtype, True), name
    assert (counted.packed is counted.scales) == (real.packed is real.scales)
    assert (counted.scales is counted.row_scales) == (real.scales is real.row_scales)


def test_what_cannot_be_packed_is_refused_without_memory_too() -> None:
    from stoker.backends.gpu.weights import pack

    uneven = [Int8Row.quantize(torch.randn(rows, 128)) for rows in (40, 64)]
    mixed = [Int8Row.quantize(WEIGHT), Fp8Block.quantize(torch.randn(128, 256))]
    for stored in ([fp8_row(WEIGHT)], uneven, mixed, [Int4.quantize(WEIGHT, group=64)]):
        with pytest.raises((ConfigError, ValueError)) as told:
            pack(stored)
        with pytest.raises(type(told.value)) as again:
            pack([without_memory(weight) for weight in stored])
        assert str(again.value) == str(told.value)
