"""config.json of the real models gives exactly their parameters, and unsupported requests are refused by name."""

import time
from typing import Any

import pytest
import torch

from stoker.backends.network.decoder import Decoder
from stoker.errors import ConfigError
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import FULL, LINEAR, ModelConfig

HYBRID = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "vocab_size": 248_320,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "max_position_embeddings": 262_144,
    "attn_output_gate": True, "attention_bias": False, "hidden_act": "silu", "dtype": "bfloat16",
    "eos_token_id": 248_044,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "head_dim": 128, "rope_theta": 1_000_000, "rope_scaling": None, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_key_value_heads": 4, "tie_word_embeddings": False,
    "use_sliding_window": False, "eos_token_id": 151_645,
}  # fmt: skip


def hybrid(model_type: str, **text: Any) -> dict[str, Any]:
    nested = {**HYBRID, **text, "model_type": f"{model_type}_text"}
    return {"model_type": model_type, "tie_word_embeddings": False, "text_config": nested, "vision_config": {}}


# published shapes and counts, MTP not included
MODELS = {
    "Qwen3.5-122B-A10B": (
        hybrid(
            "qwen3_5_moe", hidden_size=3072, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=2,
            linear_num_value_heads=64, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
        ),
        122_111_526_912,
    ),
    "Qwen3.5-397B-A17B": (
        hybrid(
            "qwen3_5_moe", hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=2,
            linear_num_value_heads=64, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
        ),
        396_346_350_336,
    ),
    "Qwen3.6-27B": (
        hybrid(
            "qwen3_5", hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
            linear_num_value_heads=48, intermediate_size=17_408, output_gate_type="swish",
        ),
        26_895_998_464,
    ),
    "Qwen3-30B-A3B": (
        {**QWEN3, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
         "moe_intermediate_size": 768, "intermediate_size": 6144},
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        {**QWEN3, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
         "moe_intermediate_size": 1536, "intermediate_size": 12_288},
        235_093_634_560,
    ),
}  # fmt: skip


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_full_size_models_have_exactly_the_published_parameters(name: str) -> None:
    raw, expected = MODELS[name]
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_dict(raw), mtp=False)
    assert count(model) == expected


def test_the_mtp_head_of_122b_has_exactly_its_parameters() -> None:
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_dict(MODELS["Qwen3.5-122B-A10B"][0]))
    assert model.mtp is not None
    assert count(model.mtp) == 2_523_679_232


def test_three_delta_layers_then_one_attention_layer() -> None:
    config = ModelConfig.from_dict(MODELS["Qwen3.5-122B-A10B"][0])
    assert config.layer_types[:4] == (LINEAR, LINEAR, LINEAR, FULL)
    assert (len(config.linear_layers), len(config.full_layers)) == (36, 12)
    assert config.full_layers[:3] == (3, 7, 11)
    assert config.rotary_dim == 64


def test_partial_rotary_factor_is_found_at_the_top_level_too() -> None:
    text = {**MODELS["Qwen3.6-27B"][0]["text_config"], "partial_rotary_factor": 0.5}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e7}
    assert ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": text}).rotary_dim == 128


def test_dense_layers_of_qwen3_moe_follow_mlp_only_layers_and_sparse_step() -> None:
    raw = {**MODELS["Qwen3-30B-A3B"][0], "num_hidden_layers": 6, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    assert ModelConfig.from_dict(raw).sparse_layers == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "3072"}, "hidden_size is '3072', expected a whole number"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}}, "rope_type is 'yarn'"),
    ],
)
def test_what_stoker_does_not_compute_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    raw = MODELS["Qwen3.5-122B-A10B"][0]
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        ModelConfig.from_dict({**raw, "text_config": {**raw["text_config"], **change}})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("num_hidden_layers", 10**6, "1,000"),
        ("num_hidden_layers", 10**18, "1,000"),
        ("num_hidden_layers", 10**4000, "1,000"),
        ("num_hidden_layers", -1, "at least 1"),
        ("num_hidden_layers", 4.0, "whole number"),
        ("num_hidden_layers", True, "whole number"),
        ("num_hidden_layers", "4", "whole number"),
        ("num_experts", 10**6, "10,000"),
        ("vocab_size", 10**9, "16,777,216"),
        ("hidden_size", 10**9, "1,048,576"),
        ("head_dim", 10**9, "16,384"),
        ("linear_conv_kernel_dim", 10**9, "1,024"),
        ("max_position_embeddings", 10**12, "2,147,483,647"),
        ("eos_token_id", [10**12], "2,147,483,647"),
        ("eos_token_id", list(range(10**6)), "10,000 numbers"),
        ("layer_types", [FULL] * 10**6, "num_hidden_layers is 48"),
        ("rms_norm_eps", 10**400, "positive number"),
        ("tie_word_embeddings", "false", "true or false"),
        ("head_dim", 3, "rotary dimensions"),
    ],
    ids=lambda value: str(value)[:30] if not isinstance(value, int) or value < 10**20 else "huge",
)
def test_absurd_sizes_are_refused_at_once_with_number_and_limit(field: str, value: Any, limit: str) -> None:
    raw = hybrid(
        "qwen3_5_moe", hidden_size=3072, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=2,
        linear_num_value_heads=64, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    )  # fmt: skip
    ModelConfig.from_dict(raw)
    (raw if field == "tie_word_embeddings" else raw["text_config"])[field] = value
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    assert time.monotonic() - started < 1
    assert field in str(caught.value)
    assert limit in str(caught.value)
    assert str(value)[:8] in str(caught.value) or isinstance(value, list)
    assert len(str(caught.value)) < 400


def test_experts_of_all_layers_together_are_bounded() -> None:
    raw = {**QWEN3, "hidden_size": 64, "num_hidden_layers": 1000, "num_attention_heads": 4, "num_experts": 1000}
    with pytest.raises(ConfigError, match="1,000 layers of num_experts 1,000 are 1,000,000 experts, expected at most"):
        ModelConfig.from_dict(raw | {"moe_intermediate_size": 64})


@pytest.mark.parametrize("layers", [10**6, 10**18])
def test_a_drafter_of_absurd_depth_is_refused(layers: int) -> None:
    raw = {"dflash_config": {"mask_token_id": 1}, "rope_theta": 1e6, "vocab_size": 512, "num_hidden_layers": layers}
    with pytest.raises(ConfigError, match=f"num_hidden_layers is {layers}, expected at most 1,000"):
        DFlashConfig.from_dict(raw)
