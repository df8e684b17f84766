"""The bf16 export against what vLLM's Qwen3_5MoeForCausalLM and its MTP class take up, name by name and shape by shape.

vLLM itself is not run here (it needs a GPU): these are the rules its loaders follow, as read in their source, which
takes text-only checkpoints since pull request 50210. Every tensor of the export must find its place, and every place of
theirs must be filled exactly once.
"""

import json
import re
from pathlib import Path

import pytest

from stoker.checkpoint.build import BuildOptions, build
from stoker.demo import EMBEDDED
from stoker.weights.checkpoint import Checkpoint

Place = tuple[str, str | int]  # parameter of vLLM's module, and which part of it
Shape = tuple[int, ...]

# part of a published name -> joined parameter, part
JOINED: dict[str, Place] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "in_proj_qkv": ("in_proj_qkvz", "0-2"),
    "in_proj_z": ("in_proj_qkvz", 3),
    "in_proj_b": ("in_proj_ba", 0),
    "in_proj_a": ("in_proj_ba", 1),
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
SINGLE = {"gate": "w13_weight", "up": "w13_weight", "down": "w2_weight"}
FUSED = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}


def place(name: str) -> Place:
    """Where vLLM's loaders put a tensor of this name."""
    if found := EXPERT.fullmatch(name):
        stem, expert, kind = found.groups()
        return f"{stem}.{SINGLE[kind]}", f"{kind} {expert}"
    stem, _, last = name.rpartition(".")
    if stem.endswith(".experts"):
        return f"{stem}.{FUSED[last]}", "all"
    module, _, projection = stem.rpartition(".")
    if projection in JOINED:
        joined, part = JOINED[projection]
        return f"{module}.{joined}.{last}", part
    return name, "all"


def mlp(prefix: str, config: dict[str, int], single: bool) -> dict[Place, Shape]:
    hidden, width, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    shared = config["shared_expert_intermediate_size"]
    places: dict[Place, Shape] = {
        (f"{prefix}.gate.weight", "all"): (count, hidden),
        (f"{prefix}.shared_expert_gate.weight", "all"): (1, hidden),
        (f"{prefix}.shared_expert.gate_up_proj.weight", 0): (shared, hidden),
        (f"{prefix}.shared_expert.gate_up_proj.weight", 1): (shared, hidden),
        (f"{prefix}.shared_expert.down_proj.weight", "all"): (hidden, shared),
    }
    if not single:
        places[f"{prefix}.experts.w13_weight", "all"] = (count, 2 * width, hidden)
        places[f"{prefix}.experts.w2_weight", "all"] = (count, hidden, width)
    for expert in range(count if single else 0):
        places[f"{prefix}.experts.w13_weight", f"gate {expert}"] = (width, hidden)
        places[f"{prefix}.experts.w13_weight", f"up {expert}"] = (width, hidden)
        places[f"{prefix}.experts.w2_weight", f"down {expert}"] = (hidden, width)
    return places


def attention(prefix: str, config: dict[str, int]) -> dict[Place, Shape]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        (f"{prefix}.qkv_proj.weight", "q"): (2 * heads * dim, hidden),  # with the output gate
        (f"{prefix}.qkv_proj.weight", "k"): (kv_heads * dim, hidden),
        (f"{prefix}.qkv_proj.weight", "v"): (kv_heads * dim, hidden),
        (f"{prefix}.o_proj.weight", "all"): (hidden, heads * dim),
        (f"{prefix}.q_norm.weight", "all"): (dim,),
        (f"{prefix}.k_norm.weight", "all"): (dim,),
    }


def delta(prefix: str, config: dict[str, int]) -> dict[Place, Shape]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    return {
        (f"{prefix}.in_proj_qkvz.weight", "0-2"): (2 * keys + values, hidden),
        (f"{prefix}.in_proj_qkvz.weight", 3): (values, hidden),
        (f"{prefix}.in_proj_ba.weight", 0): (heads, hidden),
        (f"{prefix}.in_proj_ba.weight", 1): (heads, hidden),
        (f"{prefix}.conv1d.weight", "all"): (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        (f"{prefix}.A_log", "all"): (heads,),
        (f"{prefix}.dt_bias", "all"): (heads,),
        (f"{prefix}.norm.weight", "all"): (config["linear_value_head_dim"],),
        (f"{prefix}.out_proj.weight", "all"): (hidden, values),
    }


def layer(prefix: str, config: dict[str, int], full: bool, single: bool) -> dict[Place, Shape]:
    norms: dict[Place, Shape] = {
        (f"{prefix}.{which}_layernorm.weight", "all"): (config["hidden_size"],) for which in ("input", "post_attention")
    }
    mixer = attention(f"{prefix}.self_attn", config) if full else delta(f"{prefix}.linear_attn", config)
    return norms | mixer | mlp(f"{prefix}.mlp", config, single)


def wanted_places(config: dict[str, int], kinds: list[str]) -> dict[Place, Shape]:
    """The trunk's under `model.`; those of the MTP class, which renames `mtp.` to `model.`, under `mtp.`."""
    hidden = config["hidden_size"]
    places: dict[Place, Shape] = {
        (name, "all"): (config["vocab_size"], hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    places |= {(f"{name}.weight", "all"): (hidden,) for name in ("model.norm", "mtp.norm")}
    places |= {(f"mtp.pre_fc_norm_{which}.weight", "all"): (hidden,) for which in ("embedding", "hidden")}
    places["mtp.fc.weight", "all"] = (hidden, 2 * hidden)
    for index, kind in enumerate(kinds):
        places |= layer(f"model.layers.{index}", config, kind == "full_attention", single=False)
    return places | layer("mtp.layers.0", config, full=True, single=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "bf16"
    build(BuildOptions(str(EMBEDDED), to="bf16"), out)
    return out


def test_every_tensor_has_its_place_and_every_place_its_tensor(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    tensors = Checkpoint.open(exported).tensors
    found = {place(name): tuple(info.shape) for name, info in tensors.items()}
    assert len(found) == len(tensors), "two tensors for one place"
    assert found == wanted_places(config, config["layer_types"])


def test_the_config_says_all_that_the_classes_read(exported: Path) -> None:
    """Nothing is left to the defaults of the 35B model; vLLM chooses the class by `architectures` and `model_type`."""
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["model_type"] == "qwen3_5_moe_text"
    read = """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act
        max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters attention_bias head_dim layer_types
        linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok num_experts eos_token_id
        mtp_num_hidden_layers"""
    assert not set(read.split()) - set(config)
    assert len(config["layer_types"]) == config["num_hidden_layers"]
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert "quantization_config" not in config
    assert not config["tie_word_embeddings"]
