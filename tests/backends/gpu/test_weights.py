"""compressed-tensors weights in the order of the GPU kernels: exact, or refused with what to use instead."""

import pytest
import torch

from stoker.errors import ConfigError
from stoker.weights.formats.int4_ct import Int4Ct
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
