"""The shape of the embedded model and of its drafter as the config.json files they are published with, and what they
weigh in the formats they are shipped in. Run it to see the bytes: python -m training.config
"""

from dataclasses import dataclass
from typing import Any

from stoker.sizes.weights import weight_bytes
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig

LIMIT = 24 * 2**20  # bytes in the repository
RESERVED = 16  # ids at the end of the vocabulary: special tokens, then the drafter's mask as the last

Config = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A trunk (config.json) and the DFlash drafter that fits it."""

    name: str
    trunk: Config
    drafter: Config

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.from_dict(self.trunk)

    @property
    def dflash(self) -> DFlashConfig:
        return DFlashConfig.from_dict(self.drafter)


def _trunk(**sizes: Any) -> Config:
    head_dim = sizes["head_dim"]
    third = head_dim // 8 // 3  # frequencies are dealt to three position rows that are equal for text
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": [
            "full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(sizes["num_hidden_layers"])
        ],
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [head_dim // 8 - 2 * third, third, third],
        },
        "router_aux_loss_coef": 0.001,
        "max_position_embeddings": 8192,
        "eos_token_id": sizes["vocab_size"] - RESERVED,
        **sizes,
    }


def _drafter(trunk: Config, **sizes: Any) -> Config:
    own = {key: sizes.pop(key) for key in ("block_size", "target_layer_ids")}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": trunk["hidden_size"],
        "vocab_size": trunk["vocab_size"],
        "num_target_layers": trunk["num_hidden_layers"],
        "max_position_embeddings": trunk["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "num_hidden_layers": len(sizes["layer_types"]),
        "dflash_config": {**own, "mask_token_id": trunk["vocab_size"] - 1},
        **sizes,
    }


DEMO_TRUNK = _trunk(
    hidden_size=384,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    shared_expert_intermediate_size=128,
    vocab_size=4608,
)
DEMO = Shape(
    "demo",
    DEMO_TRUNK,
    _drafter(
        DEMO_TRUNK,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=1024,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=768,
        block_size=16,
        target_layer_ids=[1, 3, 5, 7],
    ),
)
TINY_TRUNK = _trunk(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    vocab_size=512,
)
TINY = Shape(  # for tests: every part, a thousandth of the work
    "tiny",
    TINY_TRUNK,
    _drafter(
        TINY_TRUNK,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        block_size=8,
        target_layer_ids=[1, 3],
    ),
)
SHAPES = {shape.name: shape for shape in (DEMO, TINY)}


STORED_AS = {"int4": "int4-g{group}", "int8": "int8-row", "fp8": "fp8-b128", "bf16": "bf16"}  # as `sizes` names them


def quantised_format(name: str, shape: tuple[int, ...], group: int = 128) -> str:
    """How a parameter is shipped: INT4 projections and experts, FP8 shared experts, INT8 head, 16 bit for the rest."""
    if name == "lm_head.weight":
        return "int8"
    if "shared_expert." in name:
        return "fp8"
    kept = ("embed_tokens", "mtp.fc", "mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b", "conv1d")
    if len(shape) < 2 or any(part in name for part in kept) or shape[-1] % group:
        return "bf16"
    return "int4"


def byte_budget(shape: Shape, group: int = 128) -> dict[str, tuple[int, int]]:
    """Parameters and stored bytes per group of tensors."""
    import torch

    from stoker.backends.network.decoder import Decoder
    from stoker.backends.network.dflash import DFlash

    with torch.device("meta"):
        trunk, drafter = Decoder(shape.model), DFlash(shape.dflash)
    named = [(name, tuple(p.shape)) for name, p in trunk.named_parameters()]
    named += [(f"dflash.{name}", tuple(p.shape)) for name, p in drafter.named_parameters()]
    budget: dict[str, tuple[int, int]] = {}
    for name, size in named:
        kind = quantised_format(name, size, group)
        label = f"{_part(name)} ({kind})"
        count, stored = budget.get(label, (0, 0))
        elements = 1
        for extent in size:
            elements *= extent
        budget[label] = (count + elements, stored + weight_bytes(STORED_AS[kind].format(group=group), size))
    return budget


def _part(name: str) -> str:
    for prefix in ("mtp", "dflash"):
        if name.startswith(f"{prefix}."):
            return prefix
    for mark in ("embed_tokens", "lm_head", "linear_attn", "self_attn", "shared_expert", "experts"):
        if mark in name:
            return mark
    return "norms and routers"


def main() -> None:
    for name, shape in SHAPES.items():
        budget = byte_budget(shape)
        total = sum(stored for _, stored in budget.values())
        print(f"{name}: {sum(count for count, _ in budget.values()):,} parameters")
        for label, (count, stored) in budget.items():
            print(f"  {label:28} {count:>12,} parameters {stored / 2**20:8.3f} MiB")
        print(f"  {'total':28} {'':>23} {total / 2**20:8.3f} MiB of {LIMIT / 2**20:.0f}")


if __name__ == "__main__":
    main()
