"""Networks that are only evidence: counted as many parameters as the networks built from the same numbers have."""

from collections.abc import Callable
from typing import Any

import pytest
from tools.plan_fit import cases

from stoker.errors import ConfigError
from stoker.plan.catalog import by_row_name, find_scheme, read, scheme_of
from stoker.plan.evidence import measurements
from stoker.plan.families import by_size, stranger
from stoker.sizes.step import Draft, step_reads
from stoker.sizes.weights import WeightBytes
from stoker.weights.model_config import FULL

CONFIGS = {entry["name"]: entry["config"] for entry in read("others.toml")["other"]}


PUBLISHED: dict[str, tuple[str, dict[str, int]]] = {
    "DeepseekV4ForCausalLM": ("deepseek_v4", {}),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", {}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", {}),
    "Glm4MoeForCausalLM": ("glm4_moe", {"head_dim": 128}),
}


@pytest.mark.parametrize(
    ("name", "network"),
    zip(("DeepSeek-V4-Flash", "GLM-4.7-Flash", "MiniMax-M2", "GLM-4.5-Air"), PUBLISHED, strict=True),
)
def test_current_families_have_as_many_parameters_as_their_networks(name: str, network: str) -> None:
    """transformers builds them from the defaults of their configurations; norms and biases are not counted here."""
    import torch
    import transformers

    kind, changed = PUBLISHED[network]
    with torch.device("meta"):
        made = getattr(transformers, network)(transformers.AutoConfig.for_model(kind, **changed))
    counted = sum(weight.parameters for weight in stranger(CONFIGS[name], name, "").weights)
    assert counted == pytest.approx(sum(p.numel() for p in made.parameters()), rel=2e-4)


def built(name: str) -> int:
    """Parameters of the network that transformers builds from the numbers of others.toml."""
    import torch
    import transformers

    config = dict(CONFIGS[name])
    kind, every = config.pop("model_type"), config.pop("full_attention_every", 1)
    convs = config.pop("conv_layers", 0)
    config.pop("qk_norm", None)
    layers = config.get("num_hidden_layers", 0)
    types = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    if kind == "gemma4":
        config |= {"layer_types": types, "enable_moe_block": "num_experts" in config}
        config.setdefault("hidden_size_per_layer_input", 0)
    elif kind == "lfm2":
        config |= {"layer_types": ["conv"] * convs + ["full_attention"] * (layers - convs)}
        config |= {"block_auto_adjust_ff_dim": False}
        del config["head_dim"]
    classes: dict[str, tuple[str, str]] = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
        "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
        "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
        "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    }
    make_config, make = (getattr(transformers, cls) for cls in classes[kind])
    with torch.device("meta"):
        network = make(make_config(**config))
    own = {id(parameter): parameter.numel() for parameter in network.parameters()}
    # a scalar per layer (Gemma) and the routers' corrections (Nemotron) are buffers there
    kept = ("layer_scalar", "e_score_correction_bias")
    return sum(own.values()) + sum(b.numel() for n, b in network.named_buffers() if n.endswith(kept))


@pytest.mark.parametrize(
    "name",
    [
        "Ministral-3-3B-Instruct-2512",
        "gemma-4-E2B-it",
        "gemma-4-26B-A4B-it",
        "Nemotron-3-Nano-4B",
        "LFM2.5-1.2B-Instruct",
    ],
)
def test_parameters_are_those_of_the_network(name: str) -> None:
    model = stranger(CONFIGS[name], name, "")
    assert sum(weight.parameters for weight in model.weights) == built(name)


@pytest.mark.parametrize(
    ("row", "total", "active"),  # billions, as published; gemma and Muse without their vision
    [
        ("Llama-3.3-70B", 70.6, 70.6),
        ("Qwen3-Coder-Next", 79.7, 3.9),
        ("gemma-4-31b-it", 30.7, 30.7),
        ("nemotron-3-nano-30b-a3b", 31.6, 3.6),
        ("nemotron-3-super-120b-a12b", 120.7, 12.8),
        ("qwen-3.5-4b", 4.2, 4.2),
        ("muse-glimmer-30b", 27.9, 27.9),
    ],
)
def test_sizes_are_the_published_ones(row: str, total: float, active: float) -> None:
    model = by_row_name()[row.lower()]
    assert model.parameters / 1e9 == pytest.approx(total, abs=0.06)
    assert model.active_parameters / 1e9 == pytest.approx(active, abs=0.06)


def test_every_name_is_that_of_a_row() -> None:
    names = {row.model for row in measurements()}
    listed = [name for entry in read("others.toml")["other"] for name in entry["rows"]]
    assert not set(listed) - names
    assert len({name.lower() for name in listed}) >= sum(bool(entry["rows"]) for entry in read("others.toml")["other"])
    assert all(entry["source"] for entry in read("others.toml")["other"])


def test_nvidias_files_leave_some_mamba_layers_alone() -> None:
    model = by_row_name()["nemotron-3-nano-30b-a3b"]
    eight, four = (WeightBytes.of(model, find_scheme(f"nemotron-{bits}")) for bits in ("fp8", "nvfp4"))
    plain = WeightBytes.of(model, find_scheme("bf16"))
    # 18.24 billion packed values in the NVFP4 file: two weights in one, a scale for sixteen
    kept = (four.total / 2 - 0.28125 * model.parameters) / (1 - 0.28125)
    assert kept / 1e9 == pytest.approx((18.24 - 0.5625 * 31.58) / 0.4375, rel=0.05)
    assert four.total < eight.total < plain.total
    assert four.groups["attention"] == plain.groups["attention"]


def test_the_caches_of_mixed_layers() -> None:
    gemma = by_row_name()["gemma-4-26b-a4b-it"]
    # 5 full layers of 2 heads of 512, 25 sliding ones of 8 heads of 256 over 1,024 tokens
    assert gemma.kv_bytes(8192, 2.0) == 2 * (5 * 8192 * 2 * 2 * 512 + 25 * 1024 * 2 * 8 * 256)
    assert gemma.kv_bytes_per_token(2.0, FULL) == 5 * 2 * 2 * 512 * 2
    nano = by_row_name()["nemotron-3-nano-30b-a3b"]
    assert nano.recurrent_bytes == 23 * 64 * 64 * 128 * 4
    reads = step_reads(
        nano, WeightBytes.of(nano, scheme_of("bf16")), Draft(), context=1, users=1, pool=128.0, kv_item=2.0
    )
    assert reads.items["recurrent state"] == 2 * nano.recurrent_bytes
    assert reads.distinct_experts == pytest.approx(6)


def test_an_embedding_per_layer_is_looked_up_not_read() -> None:
    small = by_row_name()["gemma-4-e2b-it"]
    reads = step_reads(
        small, WeightBytes.of(small, scheme_of("bf16")), Draft(), context=1, users=1, pool=1.0, kv_item=2.0
    )
    table = 2 * 262_144 * 35 * 256
    assert reads.total == pytest.approx(2 * small.parameters - table, rel=0.001)


@pytest.mark.parametrize("make", [lambda: by_size("x", 3e9), lambda: by_row_name()["ministral-3-3b-instruct"]])
def test_a_size_alone_is_nearly_enough(make: Callable[[], Any]) -> None:
    model = make()
    assert model.active_parameters == pytest.approx(3e9, rel=0.15)
    assert 20 <= model.layers <= 60


def test_rows_known_by_size_are_predicted_too() -> None:
    known, others = cases(), cases(shape_known=False)
    assert len(known) > 300
    assert len(others) >= 40
    assert {case.row.model for case in others} >= {
        "DeepSeek-V4-Flash-0731"
    }  # its shape is known, the fit is not made to it
    assert not {case.row.id for case in known} & {case.row.id for case in others}


def test_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_type is 'mamba', and to count its layers"):
        stranger({"model_type": "mamba"}, "x", "")
