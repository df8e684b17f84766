"""Formats decided from headers and config alone: miniatures of the published releases, and ways to break them."""

import re
import subprocess
import sys

import pytest

from stoker.weights.formats.rules import Header, formats_in

LAYER = "model.language_model.layers.0"


def plain(name: str, *shape: int, dtype: str = "BF16") -> Header:
    return {name: (dtype, shape)}


def int4(module: str, n_out: int = 64, n_in: int = 256, group: int = 128) -> Header:
    return {
        f"{module}.qweight": ("I32", (n_in // 8, n_out)),
        f"{module}.qzeros": ("I32", (n_in // group, n_out // 8)),
        f"{module}.scales": ("F16", (n_in // group, n_out)),
    }


def fp8(module: str, n_out: int = 64, n_in: int = 256) -> Header:
    return {
        f"{module}.weight": ("F8_E4M3", (n_out, n_in)),
        f"{module}.weight_scale_inv": ("BF16", (-(-n_out // 128), -(-n_in // 128))),
    }


def fp8_tensor(module: str) -> Header:
    return {
        f"{module}.weight": ("F8_E4M3", (64, 256)),
        f"{module}.weight_scale": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def nvfp4_modelopt(module: str) -> Header:
    return {
        f"{module}.weight": ("U8", (64, 128)),
        f"{module}.weight_scale": ("F8_E4M3", (64, 16)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def nvfp4_ct(module: str) -> Header:
    return {
        f"{module}.weight_packed": ("U8", (64, 128)),
        f"{module}.weight_scale": ("F8_E4M3", (64, 16)),
        f"{module}.weight_global_scale": ("F32", (1,)),
    }


SHARED = f"{LAYER}.mlp.shared_expert.gate_proj"
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
    "block_name_to_quantize": "model.language_model.layers",
    "extra_config": {SHARED: {"bits": 16, "data_type": "float"}},
}
INTEL = {
    **int4(f"{LAYER}.mlp.experts.0.gate_proj"),
    **int4(f"{LAYER}.linear_attn.in_proj_a"),
    **plain(f"{SHARED}.weight", 64, 256),
    **plain(f"{LAYER}.mlp.gate.weight", 8, 256),
    **plain(f"{LAYER}.input_layernorm.weight", 256),
    **plain(f"{LAYER}.linear_attn.A_log", 64, dtype="F32"),
    **plain("mtp.layers.0.mlp.experts.0.gate_proj.weight", 64, 256),
    **plain("lm_head.weight", 512, 256),
}


def test_intel_int4_release():
    table = formats_in(INTEL, AUTO_ROUND)
    assert {name: layer.format for name, layer in table.layers.items()} == {
        f"{LAYER}.mlp.experts.0.gate_proj": "int4-g128",
        f"{LAYER}.linear_attn.in_proj_a": "int4-g128",
        SHARED: "bf16",
        f"{LAYER}.mlp.gate": "bf16",
        f"{LAYER}.input_layernorm": "bf16",
        f"{LAYER}.linear_attn.A_log": "fp32",
        "mtp.layers.0.mlp.experts.0.gate_proj": "bf16",
        "lm_head": "bf16",
    }
    expert = table.layers[f"{LAYER}.mlp.experts.0.gate_proj"]
    assert (expert.shape, expert.nbytes) == ((64, 256), 64 * 128 + 2 * 8 * 4 + 2 * 64 * 2)
    # The router is no Linear, so the release never lists it; worth a note, not an error.
    assert [(f.tensor, f.severity) for f in table.findings] == [(f"{LAYER}.mlp.gate.weight", "note")]


def test_hybrid_with_fp8_shared_experts_under_an_unchanged_config():
    header = {**{k: v for k, v in INTEL.items() if k != f"{SHARED}.weight"}, **fp8(SHARED)}
    table = formats_in(header, AUTO_ROUND)
    assert table.layers[SHARED].format == "fp8-b128"
    assert not table.errors
    assert "says 16 bit (extra_config" in str(next(f for f in table.findings if f.found == "fp8-b128"))
    assert table.layers[SHARED].tensors == {
        "weight": f"{SHARED}.weight",
        "weight_scale_inv": f"{SHARED}.weight_scale_inv",
    }


def test_hybrid_can_say_so_in_extra_config():
    extra = {
        r".*shared_expert\..*": {"bits": 8, "data_type": "fp8", "group_size": [128, 128]},
        "lm_head": {"bits": 8, "data_type": "int", "group_size": -1},
    }
    header = {
        **fp8(SHARED),
        "lm_head.weight": ("I8", (512, 256)),
        "lm_head.weight_scale": ("F32", (512, 1)),
    }
    table = formats_in(header, {**AUTO_ROUND, "extra_config": extra})
    assert {name: layer.format for name, layer in table.layers.items()} == {
        SHARED: "fp8-b128",
        "lm_head": "int8-row",
    }
    assert not table.findings


def test_auto_round_exact_name_comes_before_patterns_and_names_are_no_patterns():
    extra = {
        r"layers\.\d+\.mlp\.up_proj$": {"bits": 16},
        "model.layers.1.mlp.up_proj": {"bits": 4},
        "model.layers.2.mlp.gate": {"bits": 16},
    }
    header = {
        **plain("model.layers.0.mlp.up_proj.weight", 64, 256),
        **int4("model.layers.1.mlp.up_proj"),
        **plain("model.layers.2.mlp.gate.weight", 64, 256),
        **int4("model.layers.2.mlp.gate_proj"),  # which "model.layers.2.mlp.gate" must not cover
    }
    config = {**AUTO_ROUND, "block_name_to_quantize": None, "extra_config": extra}
    assert not formats_in(header, config).findings


def test_gptq_dynamic_rules_first_match_decides():
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "dynamic": {r"-:.*shared_expert.*": {}, r"+:.*\.down_proj$": {"group_size": 32}, r".*v_proj": {"bits": 16}},
    }
    header = {
        **plain("model.layers.0.mlp.shared_expert.down_proj.weight", 64, 256),
        **int4("model.layers.0.mlp.down_proj", group=32),
        **plain("model.layers.0.self_attn.v_proj.weight", 64, 256),
        **int4("model.layers.0.self_attn.q_proj"),
        **plain("lm_head.weight", 64, 256),
    }
    assert not formats_in(header, config).findings
    wrong = {**header, **int4("model.layers.0.mlp.down_proj", group=64)}
    (finding,) = formats_in(wrong, config).errors
    assert re.search(r"says int4-g32 \(dynamic\['\+:.*the file has int4-g64", str(finding))


FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual", f"{LAYER}.mlp.gate", "mtp.fc"],
}


def test_qwen_fp8_release_keeps_what_it_lists():
    header = {
        **fp8(f"{LAYER}.mlp.gate_proj", 130, 256),
        **plain(f"{LAYER}.mlp.gate.weight", 8, 256),
        **plain("model.visual.blocks.0.attn.qkv.weight", 64, 64),
        **plain("lm_head.weight", 512, 256),
    }
    table = formats_in(header, FP8)
    assert not table.findings
    assert table.layers[f"{LAYER}.mlp.gate_proj"].format == "fp8-b128"


def test_fp8_where_the_config_keeps_16_bit_is_an_error():
    (finding,) = formats_in(fp8(f"{LAYER}.mlp.gate"), FP8).errors
    assert str(finding) == (
        f"{LAYER}.mlp.gate.weight: quantization_config says 16 bit "
        f"(modules_to_not_convert has '{LAYER}.mlp.gate'), the file has fp8-b128."
    )


def test_modelopt_excludes_by_wildcard_and_by_parent():
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head", f"{LAYER}.linear_attn*", f"{LAYER}.mlp.shared_expert", "mtp*"],
    }
    header = {
        **nvfp4_modelopt(f"{LAYER}.mlp.experts.0.gate_proj"),
        **plain(f"{LAYER}.linear_attn.in_proj_a.weight", 64, 256),
        **plain(f"{SHARED}.weight", 64, 256),
        **plain("mtp.fc.weight", 64, 256),
        **plain("lm_head.weight", 64, 256),
        f"{LAYER}.self_attn.k_proj.k_scale": ("F32", ()),
    }
    assert not formats_in(header, config).findings
    nested = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": config["ignore"]}}
    assert not formats_in(header, nested).findings
    (finding,) = formats_in(nvfp4_modelopt("mtp.fc"), config).errors
    assert (finding.tensor, finding.expected, finding.found) == ("mtp.fc.weight", "16 bit", "nvfp4-modelopt")


def test_modelopt_mixed_precision_by_layer_or_by_group():
    layers = {
        f"{LAYER}.self_attn.q_proj": {"quant_algo": "FP8"},
        f"{LAYER}.mlp.experts.0.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }
    groups = {
        "group_0": {"targets": [f"{LAYER}.self_attn.q_proj"], "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {
            "targets": [f"{LAYER}.mlp.experts.0.up_proj"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
        },
    }
    header = {
        **fp8_tensor(f"{LAYER}.self_attn.q_proj"),
        **nvfp4_modelopt(f"{LAYER}.mlp.experts.0.up_proj"),
        **plain(f"{LAYER}.mlp.gate.weight", 8, 256),
    }
    for said in ({"quantized_layers": layers}, {"config_groups": groups}):
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", **said}
        assert not formats_in(header, config).findings


def test_compressed_tensors_ignores_by_name_and_by_pattern():
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*linear_attn.*", "re:.*mlp[.]gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            }
        },
    }
    header = {
        **nvfp4_ct(f"{LAYER}.mlp.experts.0.gate_proj"),
        **plain(f"{LAYER}.linear_attn.out_proj.weight", 64, 256),
        **plain(f"{LAYER}.mlp.gate.weight", 8, 256),
        **plain("lm_head.weight", 64, 256),
    }
    assert not formats_in(header, config).findings
    # ModelOpt's spelling under this config: the same bytes, but a global scale that works the other way round.
    (finding,) = formats_in(nvfp4_modelopt(f"{LAYER}.mlp.up_proj"), config).errors
    assert (finding.expected, finding.found) == ("nvfp4-ct", "nvfp4-modelopt")


def test_fused_experts_have_no_weight_suffix():
    experts = f"{LAYER}.mlp.experts"
    header = {
        **plain(f"{experts}.gate_up_proj", 4, 128, 64),
        f"{experts}.down_proj": ("F8_E4M3", (4, 64, 64)),
        f"{experts}.down_proj_scale_inv": ("F32", (4, 1, 1)),
    }
    layers = formats_in(header).layers
    assert {name: layer.format for name, layer in layers.items()} == {
        f"{experts}.gate_up_proj": "bf16",
        f"{experts}.down_proj": "fp8-b128",
    }
    assert layers[f"{experts}.down_proj"].shape == (4, 64, 64)


def test_an_unquantised_checkpoint_needs_no_config_and_a_quantised_one_gets_a_note():
    assert not formats_in(plain("lm_head.weight", 64, 256)).findings
    (finding,) = formats_in(int4("model.layers.0.mlp.up_proj")).findings
    assert (finding.severity, finding.rule) == ("note", "no quantization_config")


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"a.weight": ("F8_E4M3", (64, 256))}, "a: FP8 in 128x128 blocks needs .* weight_scale_inv is missing"),
        ({"a.weight_scale_inv": ("BF16", (1, 2))}, "a has weight_scale_inv BF16 .* but no weight"),
        (
            {"a.weight": ("BF16", (64, 256)), "a.weight_scale_inv": ("BF16", (1, 2))},
            "a: weight_scale_inv BF16 .* does not belong beside weight BF16",
        ),
        ({**int4("a"), "a.scales": ("F16", (3, 64))}, "a: 256 inputs in 3 groups"),
        ({**int4("a"), "a.weight": ("BF16", (64, 256))}, "does not belong beside qweight"),
        ({"a.weight": ("I64", (64, 256))}, r"a: weight I64 \[64, 256\] is no form Stoker reads"),
        ({"a": ("U8", (64, 128))}, "a: weight U8 .* is no form Stoker reads"),
        ({"a": ("BF16", (64, 128)), "a.weight": ("BF16", (64, 128))}, "a is stored twice, as a and as a.weight"),
        (
            {
                "a.weight_packed": ("I32", (64, 32)),
                "a.weight_scale": ("BF16", (64, 2)),
                "a.weight_zero_point": ("I32", (8, 2)),
            },
            "weight_zero_point makes this asymmetric INT4",
        ),
        ({**fp8("a"), "a.weight_scale_inv": ("BF16", (2, 2))}, r"expected \[1, 2\]"),
        ({**nvfp4_ct("a"), "a.weight_packed": ("I8", (64, 128))}, "weight_packed is I8, expected U8"),
    ],
)
def test_headers_that_contradict_themselves(header, sentence):
    (finding,) = formats_in(header).errors
    assert re.search(sentence, str(finding))
    assert finding.tensor in header


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"group_size": 64}, r"says int4-g64 \(bits 4, group_size 64, sym True\), the file has int4-g128"),
        ({"sym": False}, "says int4-g128 asymmetric"),
        ({"bits": 8, "group_size": 64}, "says int8-g64"),
        ({"packing_format": "auto_round:auto_awq"}, "packed as auto_round:auto_awq"),
        ({"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}}, "says 16 bit"),
    ],
)
def test_config_that_contradicts_the_headers(change, sentence):
    config = {**AUTO_ROUND, "block_name_to_quantize": "model.layers", **change}
    header = int4("model.layers.0.mlp.up_proj")
    (finding,) = formats_in(header, config).errors
    assert re.match(f"model.layers.0.mlp.up_proj.qweight: .*{sentence}", str(finding))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes; Stoker reads auto-round, gptq"),
        ({"bits": 4}, "quant_method missing"),
        ({**AUTO_ROUND, "extra_config": ["lm_head"]}, "extra_config is .* expected an object"),
        ({"quant_method": "gptq", "dynamic": {"-:(": {}}}, "no valid pattern"),
    ],
)
def test_config_that_cannot_be_read(config, sentence):
    (finding,) = formats_in(plain("lm_head.weight", 64, 256), config).errors
    assert re.search(sentence, str(finding))
    assert finding.tensor == "config.json"


def test_shapes_may_come_as_json_lists():
    header = {name: (dtype, list(shape)) for name, (dtype, shape) in INTEL.items()}
    assert formats_in(header, AUTO_ROUND).layers == formats_in(INTEL, AUTO_ROUND).layers  # type: ignore[arg-type]


def test_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from stoker.weights.formats.rules import formats_in\n"
        "print(formats_in({'a.weight': ('BF16', (2, 3))}).layers['a'].format)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "bf16", result.stderr
