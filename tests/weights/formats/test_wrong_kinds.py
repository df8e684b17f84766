"""A quantization_config with a value of the wrong type is a finding, whatever the value."""

from typing import Any

import pytest

from stoker.weights.formats.rules import formats_in

HEADER = {
    "model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (64, 128)),
    "lm_head.weight": ("BF16", (512, 128)),
}


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "auto-round", "bits": "four"},
        {"quant_method": "auto-round", "bits": float("inf")},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": 3}},
        {"quant_method": "gptq", "bits": [4]},
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:[": {}}},
        {"quant_method": "fp8", "weight_block_size": -1},
        {"quant_method": "fp8", "modules_to_not_convert": 7},
        {"quant_method": "compressed-tensors", "ignore": [3]},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": 3}},
        {"quant_method": "modelopt", "ignore": 3},
        {"quant_method": "bitsandbytes"},
    ],
)
def test_wrong_kinds_are_one_finding_and_the_layers_are_still_read(config: dict[str, Any]) -> None:
    table = formats_in(HEADER, config)
    assert set(table.layers) == {"model.layers.0.mlp.experts.0.up_proj", "lm_head"}
    assert [finding.tensor for finding in table.errors] == ["config.json"]
    assert "quantization_config" in str(table.errors[0])
    assert "\n" not in str(table.errors[0])
