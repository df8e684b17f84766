"""The same bytes, dequantised here and by the packages that publish the formats.

The vectors in the other files hold without any package; these say that the packages agree with them.
"""

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from stoker.weights.formats.fp8 import Fp8Block, Fp8Row
from stoker.weights.formats.int4_ct import Int4Ct
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.nvfp4 import Nvfp4


def random_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 0.02


class TestCompressedTensors:
    def scheme(self, **weights):
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))

    def test_nvfp4_codes_and_values(self):
        scheme = self.scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        w = random_weight(24, 64)
        ours = Nvfp4.quantize(w)
        state = {
            "weight": w,
            "weight_scale": ours.weight_scale.float(),
            "weight_global_scale": ours.weight_global_scale,
        }
        theirs = NVFP4PackedCompressor.compress(state, scheme)
        read = Nvfp4.from_tensors(
            {suffix: theirs[suffix] for suffix in ("weight_packed", "weight_scale", "weight_global_scale")},
            "layer",
        )
        assert torch.equal(read.weight_packed, ours.weight_packed)
        decompressed = NVFP4PackedCompressor.decompress(theirs, scheme)["weight"]
        assert torch.equal(decompressed, ours.dequantize(decompressed.dtype))

    def test_nvfp4_scales(self):
        args = self.scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16).weights
        w = random_weight(24, 64, seed=3)
        groups = w.unflatten(-1, (-1, 16))
        global_scale = generate_gparam(w.amin(), w.amax())
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=global_scale)
        ours = Nvfp4.quantize(w)
        assert torch.equal(ours.weight_global_scale, global_scale)
        assert torch.equal(ours.weight_scale, scale.to(torch.float8_e4m3fn))

    def test_int8_per_channel(self):
        scheme = self.scheme(num_bits=8, type="int", strategy="channel", symmetric=True)
        ours = Int8Row.quantize(random_weight(33, 57))
        assert torch.equal(IntQuantizationCompressor.decompress(ours.tensors(), scheme)["weight"], ours.dequantize())

    @pytest.mark.parametrize("group", [128, 64, 32, None])
    def test_int4_pack_quantized(self, group):
        strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        scheme = self.scheme(num_bits=4, type="int", symmetric=True, **strategy)
        w = random_weight(24, 256)
        scale = (w.unflatten(-1, (-1, group or 256)).abs().amax(-1) / 7.5).bfloat16()
        theirs = PackedQuantizationCompressor.compress({"weight": w, "weight_scale": scale.float()}, scheme)
        values = PackedQuantizationCompressor.decompress(dict(theirs), scheme)["weight"]
        read = Int4Ct.from_tensors({**theirs, "weight_scale": scale}, "layer")
        assert torch.equal(read.dequantize(values.dtype), values)
        gptq = read.in_gptq_order()
        assert gptq is not None
        assert torch.equal(gptq.dequantize(), read.dequantize())

    def test_fp8_per_channel(self):
        scheme = self.scheme(num_bits=8, type="float", strategy="channel")
        w = random_weight(33, 57)
        scale = w.abs().amax(-1, keepdim=True) / 448
        theirs = FloatQuantizationCompressor.compress({"weight": w, "weight_scale": scale}, scheme)
        read = Fp8Row.from_tensors({"weight": theirs["weight"], "weight_scale": scale}, "layer")
        assert torch.equal(FloatQuantizationCompressor.decompress(theirs, scheme)["weight"], read.dequantize())

    @pytest.mark.parametrize("shape", [(256, 384), (300, 200)])
    def test_fp8_block(self, shape):
        scheme = self.scheme(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
        w = random_weight(*shape)
        ours = Fp8Block.quantize(w, scale_dtype=torch.float32)
        state = {"weight": w, "weight_scale": ours.weight_scale_inv}
        theirs = FloatQuantizationCompressor.compress(state, scheme)
        assert torch.equal(theirs["weight"].view(torch.uint8), ours.weight.view(torch.uint8))
        assert torch.equal(FloatQuantizationCompressor.decompress(theirs, scheme)["weight"], ours.dequantize())


def test_transformers_dequantises_fp8_the_same():
    ours = Fp8Block.quantize(random_weight(256, 384))
    theirs = Fp8Dequantize(None)._dequantize_one(ours.weight, ours.weight_scale_inv.float(), torch.float32)
    assert torch.equal(theirs, ours.dequantize())
