"""The config.json that vLLM reads: a published Qwen3.5 MoE of a given shape, text part only, in BF16 or INT4."""

from typing import Any

from stoker.weights.model_config import ModelConfig

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
SHARED = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate")


def text_config(config: ModelConfig, weights: str, mtp: str) -> dict[str, Any]:
    """config.json as the published checkpoints have it, text part only."""
    moe, delta = config.moe, config.delta
    assert moe is not None
    assert delta is not None
    rotary = config.rotary_dim // 2
    found: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_5_moe_text",
        "dtype": config.dtype,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": list(config.layer_types),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attn_output_gate": config.attention_gate,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim,
            "mrope_interleaved": True,
            "mrope_section": [(rotary + 2) // 3, (rotary + 1) // 3, rotary // 3],
        },
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_kernel,
        "mamba_ssm_dtype": "float32",
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.intermediate_size,
        "shared_expert_intermediate_size": moe.shared_intermediate_size,
        "mtp_num_hidden_layers": config.mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if weights == "int4":
        found["quantization_config"] = int4_config(len(config.layer_types), config.mtp_layers if mtp == "int4" else 0)
    return found


def int4_config(layers: int, mtp_layers: int) -> dict[str, Any]:
    """AutoRound's INT4 in GPTQ layout; shared experts, head and what lies outside the blocks stay in 16 bit."""
    blocks = {"model.layers": layers, "mtp.layers": mtp_layers}
    mlps = [f"{name}.{layer}.mlp" for name, count in blocks.items() for layer in range(count)]
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "data_type": "int",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "block_name_to_quantize": ",".join(name for name, count in blocks.items() if count),
        "extra_config": {f"{mlp}.{part}": {"bits": 16, "data_type": "float"} for mlp in mlps for part in SHARED},
    }
