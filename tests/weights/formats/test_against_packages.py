"""The same bytes, dequantised here and by the packages that publish the formats; skipped where they are absent.

The vectors in the other files hold without any package; these say that the packages agree with them.
"""

import pytest
import torch

from stoker.weights.formats.fp8 import Fp8Block, Fp8Row
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int4_ct import Int4Ct
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.nvfp4 import Nvfp4, Nvfp4ModelOpt


def random_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 0.02


@pytest.mark.parametrize("group", [128, 64, 32])
class TestAutoRound:
    @pytest.fixture
    def quant_linear(self):
        return pytest.importorskip("auto_round_extension.torch.qlinear_torch_zp").QuantLinear

    def test_dequantises_the_same(self, group, quant_linear):
        weight = Int4.quantize(random_weight(96, 256), group=group)
        theirs = quant_linear(4, group, 256, 96, bias=False)
        theirs.qweight, theirs.qzeros = weight.qweight, weight.qzeros
        theirs.scales = weight.scales.float()
        identity = torch.eye(256)
        assert torch.equal(theirs(identity).T, weight.dequantize())

    def test_reads_what_it_packs(self, group, quant_linear):
        round_to_nearest = pytest.importorskip("auto_round.data_type.int").quant_tensor_rtn_sym
        w = random_weight(96, 256, seed=1)
        rounded, scale, zero = round_to_nearest(w, bits=4, group_size=group)
        linear = torch.nn.Linear(256, 96, bias=False)
        linear.weight.data = rounded
        theirs = quant_linear(4, group, 256, 96, bias=False)
        theirs.pack(linear, scale.reshape(96, -1), zero, device="cpu")
        packed = {"qweight": theirs.qweight, "qzeros": theirs.qzeros, "scales": theirs.scales}
        read = Int4.from_tensors(packed, "layer")
        assert (read.scales < 0).any()
        assert (read.scales > 0).any()
        assert torch.equal(read.dequantize(), rounded)

        ours = Int4.quantize(w, group=group, clip_search=False)
        for suffix, tensor in packed.items():
            assert torch.equal(ours.tensors()[suffix], tensor), suffix


@pytest.mark.parametrize("group", [128, 64, 32])
def test_gptqmodel_dequantises_the_same(group):
    torch_linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    weight = Int4.quantize(random_weight(64, 256), group=group)
    assert weight.qzeros is not None
    theirs = torch_linear.TorchLinear(
        bits=4, group_size=group, sym=True, desc_act=False, in_features=256, out_features=64
    )
    theirs.qweight.data, theirs.qzeros.data = weight.qweight, weight.qzeros.clone()
    theirs.scales.data = weight.scales.float()
    theirs.post_init()
    model = pytest.importorskip("gptqmodel.utils.model")
    model.convert_gptq_v1_to_v2_format_module(theirs, bits=4, pack_dtype=torch.int32)
    assert torch.equal(theirs.dequantize_weight().T, weight.dequantize())


class TestCompressedTensors:
    def scheme(self, **weights):
        package = pytest.importorskip("compressed_tensors.quantization")
        return package.QuantizationScheme(targets=["Linear"], weights=package.QuantizationArgs(**weights))

    def test_nvfp4_codes_and_values(self):
        compressor = pytest.importorskip("compressed_tensors.compressors.nvfp4.base").NVFP4PackedCompressor
        scheme = self.scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        w = random_weight(24, 64)
        ours = Nvfp4.quantize(w)
        state = {
            "weight": w,
            "weight_scale": ours.weight_scale.float(),
            "weight_global_scale": ours.weight_global_scale,
        }
        theirs = compressor.compress(state, scheme)
        read = Nvfp4.from_tensors(
            {suffix: theirs[suffix] for suffix in ("weight_packed", "weight_scale", "weight_global_scale")},
            "layer",
        )
        assert torch.equal(read.weight_packed, ours.weight_packed)
        decompressed = compressor.decompress(theirs, scheme)["weight"]
        assert torch.equal(decompressed, ours.dequantize(decompressed.dtype))

    def test_nvfp4_scales(self):
        package = pytest.importorskip("compressed_tensors.quantization.utils")
        args = self.scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16).weights
        w = random_weight(24, 64, seed=3)
        groups = w.unflatten(-1, (-1, 16))
        global_scale = package.generate_gparam(w.amin(), w.amax())
        scale, _ = package.calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=global_scale)
        ours = Nvfp4.quantize(w)
        assert torch.equal(ours.weight_global_scale, global_scale)
        assert torch.equal(ours.weight_scale, scale.to(torch.float8_e4m3fn))

    def test_int8_per_channel(self):
        compressor = pytest.importorskip(
            "compressed_tensors.compressors.naive_quantized.base"
        ).IntQuantizationCompressor
        scheme = self.scheme(num_bits=8, type="int", strategy="channel", symmetric=True)
        ours = Int8Row.quantize(random_weight(33, 57))
        assert torch.equal(compressor.decompress(ours.tensors(), scheme)["weight"], ours.dequantize())

    @pytest.mark.parametrize("group", [128, 64, 32, None])
    def test_int4_pack_quantized(self, group):
        compressor = pytest.importorskip(
            "compressed_tensors.compressors.pack_quantized.base"
        ).PackedQuantizationCompressor
        strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        scheme = self.scheme(num_bits=4, type="int", symmetric=True, **strategy)
        w = random_weight(24, 256)
        scale = (w.unflatten(-1, (-1, group or 256)).abs().amax(-1) / 7.5).bfloat16()
        theirs = compressor.compress({"weight": w, "weight_scale": scale.float()}, scheme)
        values = compressor.decompress(dict(theirs), scheme)["weight"]
        read = Int4Ct.from_tensors({**theirs, "weight_scale": scale}, "layer")
        assert torch.equal(read.dequantize(values.dtype), values)
        gptq = read.in_gptq_order()
        assert gptq is not None
        assert torch.equal(gptq.dequantize(), read.dequantize())

    def test_fp8_per_channel(self):
        compressor = pytest.importorskip(
            "compressed_tensors.compressors.naive_quantized.base"
        ).FloatQuantizationCompressor
        scheme = self.scheme(num_bits=8, type="float", strategy="channel")
        w = random_weight(33, 57)
        scale = w.abs().amax(-1, keepdim=True) / 448
        theirs = compressor.compress({"weight": w, "weight_scale": scale}, scheme)
        read = Fp8Row.from_tensors({"weight": theirs["weight"], "weight_scale": scale}, "layer")
        assert torch.equal(compressor.decompress(theirs, scheme)["weight"], read.dequantize())

    @pytest.mark.parametrize("shape", [(256, 384), (300, 200)])
    def test_fp8_block(self, shape):
        compressor = pytest.importorskip(
            "compressed_tensors.compressors.naive_quantized.base"
        ).FloatQuantizationCompressor
        scheme = self.scheme(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
        w = random_weight(*shape)
        ours = Fp8Block.quantize(w, scale_dtype=torch.float32)
        state = {"weight": w, "weight_scale": ours.weight_scale_inv}
        theirs = compressor.compress(state, scheme)
        assert torch.equal(theirs["weight"].view(torch.uint8), ours.weight.view(torch.uint8))
        assert torch.equal(compressor.decompress(theirs, scheme)["weight"], ours.dequantize())


def test_transformers_dequantises_fp8_the_same():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "Fp8Dequantize"):
        pytest.skip("this transformers dequantises elsewhere")
    ours = Fp8Block.quantize(random_weight(256, 384))
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(ours.weight, ours.weight_scale_inv.float(), torch.float32)
    assert torch.equal(theirs, ours.dequantize())


def test_modelopt_nvfp4_bytes_and_values():
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    w = random_weight(24, 64)
    theirs, scale, scale_2 = qtensor.NVFP4QTensor.quantize(w.clone(), 16)
    ours = Nvfp4ModelOpt.quantize(w)
    assert torch.equal(ours.weight, theirs._quantized_data)
    assert torch.equal(ours.weight_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(ours.weight_scale_2, scale_2)
    values = theirs.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    assert torch.equal(ours.dequantize(), values)
