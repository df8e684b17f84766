"""What config.json asks for, derived without torch, is what the torch module has; and every tensor finds its group."""

from math import prod

import pytest
import torch

from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash
from stoker.sizes.network import Network
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import GROUPS, drafter_parameters, group_of, model_parameters, single_experts
from tests.conftest import FAMILIES
from tests.support.random_checkpoint import small_config, small_drafter_config
from tests.weights.test_model_config import MODELS

SMALL = {
    **{family: small_config(family) for family in FAMILIES},
    "tied head": small_config("qwen3_5_moe_text", tie_word_embeddings=True),
    "no MTP": small_config("qwen3_5_moe_text", mtp_num_hidden_layers=0),
    "some dense layers": small_config("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=1),
    "no shared expert": small_config("qwen3_5_moe_text", shared_expert_intermediate_size=0),
}


@pytest.mark.parametrize("name", [*SMALL, *MODELS])
def test_names_and_shapes_are_those_of_the_module(name: str) -> None:
    config = ModelConfig.from_dict(SMALL[name] if name in SMALL else MODELS[name][0])
    with torch.device("meta"):
        module = Decoder(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert model_parameters(config) == shapes


def test_names_and_shapes_of_a_drafter_are_those_of_the_module() -> None:
    config = DFlashConfig.from_dict(small_drafter_config(SMALL["no MTP"]))
    with torch.device("meta"):
        module = DFlash(config)
    assert drafter_parameters(config) == {name: tuple(value.shape) for name, value in module.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    raw, published = MODELS[name]
    shapes = model_parameters(ModelConfig.from_dict(raw))
    assert sum(prod(shape) for name, shape in shapes.items() if not name.startswith("mtp.")) == published


def test_122b_has_785_mtp_tensors_and_ten_billion_active_parameters() -> None:
    config = ModelConfig.from_dict(MODELS["Qwen3.5-122B-A10B"][0])
    mtp = {name: shape for name, shape in model_parameters(config).items() if name.startswith("mtp.")}
    assert sum(prod(shape) for shape in mtp.values()) == 2_523_679_232
    single: dict[str, tuple[int, ...]] = {}
    for name, shape in mtp.items():
        single |= single_experts(name, shape) if ".experts." in name else {name: shape}
    assert (len(mtp), len(single)) == (19, 785)
    assert sum(prod(shape) for shape in single.values()) == 2_523_679_232
    assert Network.of(config).active_parameters == pytest.approx(9.77e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.language_model.layers.3.mlp.experts.17.up_proj.qweight", "routed experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "routed experts"),
        ("model.layers.3.mlp.experts.down_proj_scale_inv", "routed experts"),
        ("model.layers.3.mlp.shared_expert.down_proj.weight_scale_inv", "shared experts"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.3.mlp.gate.weight", "router"),
        ("model.layers.3.mlp.gate", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "dense MLP"),
        ("model.layers.3.self_attn.q_norm.weight", "attention"),
        ("model.layers.3.linear_attn.A_log", "DeltaNet"),
        ("model.layers.3.linear_attn.norm.weight", "DeltaNet"),
        ("model.layers.3.post_attention_layernorm.weight", "norms"),
        ("model.language_model.norm.weight", "norms"),
        ("norm.weight", "norms"),
        ("lm_head.weight", "head"),
        ("language_model.lm_head.weight_scale", "head"),
        ("language_model.model.embed_tokens.weight", "embedding"),
        ("mtp.layers.0.mlp.experts.3.up_proj.weight", "MTP"),
        ("mtp.norm.weight", "MTP"),
        ("model.visual.blocks.0.mlp.linear_fc1.weight", "vision"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "other"),
        ("something.else", "other"),
    ],
)
def test_groups(name: str, group: str) -> None:
    assert group_of(name) == group
    assert group in GROUPS


def test_every_parameter_of_every_family_has_a_group() -> None:
    for raw in SMALL.values():
        assert "other" not in {group_of(name) for name in model_parameters(ModelConfig.from_dict(raw))}
