"""The same bytes, dequantised here and by the packages that quantise: auto-round, gptqmodel, nvidia-modelopt.

They ask for another torch than ours, so `make test-all` installs them into a folder of their own (`quantisers.txt`) and
runs this file in a process of its own. The vectors in the other files hold without any package.
"""

from importlib.util import find_spec

import pytest
import torch

from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.nvfp4 import Nvfp4ModelOpt
from tests.weights.formats.test_against_packages import random_weight

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(find_spec, ("auto_round", "gptqmodel", "modelopt"))),
        reason="`make test-all` installs the quantisers into build/quantisers and runs this with PYTHONPATH there",
    ),
]


@pytest.mark.parametrize("group", [128, 64, 32])
class TestAutoRound:
    @pytest.fixture
    def quant_linear(self):
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

        return QuantLinear

    def test_dequantises_the_same(self, group, quant_linear):
        weight = Int4.quantize(random_weight(96, 256), group=group)
        theirs = quant_linear(4, group, 256, 96, bias=False)
        theirs.qweight, theirs.qzeros = weight.qweight, weight.qzeros
        theirs.scales = weight.scales.float()
        identity = torch.eye(256)
        assert torch.equal(theirs(identity).T, weight.dequantize())

    def test_reads_what_it_packs(self, group, quant_linear):
        from auto_round.data_type.int import quant_tensor_rtn_sym as round_to_nearest

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
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    weight = Int4.quantize(random_weight(64, 256), group=group)
    assert weight.qzeros is not None
    theirs = TorchLinear(bits=4, group_size=group, sym=True, desc_act=False, in_features=256, out_features=64)
    theirs.qweight.data, theirs.qzeros.data = weight.qweight, weight.qzeros.clone()
    theirs.scales.data = weight.scales.float()
    theirs.post_init()
    convert_gptq_v1_to_v2_format_module(theirs, bits=4, pack_dtype=torch.int32)
    assert torch.equal(theirs.dequantize_weight().T, weight.dequantize())


def test_modelopt_nvfp4_bytes_and_values():
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    w = random_weight(24, 64)
    theirs, scale, scale_2 = NVFP4QTensor.quantize(w.clone(), 16)
    ours = Nvfp4ModelOpt.quantize(w)
    assert torch.equal(ours.weight, theirs._quantized_data)
    assert torch.equal(ours.weight_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(ours.weight_scale_2, scale_2)
    values = theirs.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    assert torch.equal(ours.dequantize(), values)
