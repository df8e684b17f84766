"""Writes small random checkpoints of the supported families, in the layouts published ones come in.

The demo and the tests run on these. The numbers are random; names, shapes, dtypes and files are the real thing.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.backends.network.decoder import Decoder
from stoker.backends.network.dflash import DFlash
from stoker.weights.checkpoint import INDEX
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.model_config import ModelConfig


def small_config(model_type: str = "qwen3_5_moe_text", **changes: Any) -> dict[str, Any]:
    """A config.json of the family, small enough for a laptop."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": 0,
    }
    if model_type == "qwen3_moe":
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "intermediate_size": 192,
        }
    else:
        moe = "moe" in model_type
        config |= {
            "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "full_attention_interval": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
        }
        config |= {"shared_expert_intermediate_size": 64} if moe else {"intermediate_size": 192}
    if "moe" in model_type:
        config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    return config | changes


def small_drafter_config(trunk: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A DFlash config.json that fits `trunk`."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": trunk["hidden_size"],
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 160,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "vocab_size": trunk["vocab_size"],
        "num_target_layers": trunk["num_hidden_layers"],
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": trunk["vocab_size"] - 1,
            "target_layer_ids": [1, trunk["num_hidden_layers"] - 1],
        },
    } | changes


def random_tensors(module: nn.Module, offset_norms: bool, seed: int) -> Iterator[tuple[str, Tensor]]:
    """fp32 values on a scale that keeps activations near 1, for every parameter of a module made on `meta`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            values = torch.log(torch.rand(parameter.shape, generator=generator) * 15.0 + 0.01)
        elif name.endswith("dt_bias"):  # softplus(dt_bias) from 0.001 to 0.1: heads that remember 1 to 1000 tokens
            rate = torch.exp(torch.rand(parameter.shape, generator=generator) * math.log(100.0)) * 1e-3
            values = rate + torch.log(-torch.expm1(-rate))
        elif "norm" in name:
            plain = not offset_norms or name.endswith("linear_attn.norm.weight")
            values = (1.0 if plain else 0.0) + 0.2 * values
        elif parameter.dim() >= 2 and "embed_tokens" not in name:
            values = values / math.sqrt(parameter.shape[-1])
        yield name, values


def write_random_checkpoint(
    directory: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    prefix: str = "model.",
    per_expert: tuple[str, ...] = ("mtp.",),
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 2,
) -> None:
    """config.json, `shards` safetensors files and their index; MTP in model_extra_tensors.safetensors.

    Experts of parameters that start with one of `per_expert` are stored one by one, others fused.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    parsed = ModelConfig.from_dict(config)
    with torch.device("meta"):
        model = Decoder(parsed)
    trunk: dict[str, Tensor] = {}
    mtp: dict[str, Tensor] = {}
    for name, values in random_tensors(model, parsed.norm_offset, seed):
        keep_fp32 = name.endswith(("A_log", "linear_attn.norm.weight"))
        values = values if keep_fp32 else values.to(dtype)
        if name.startswith("mtp."):
            mtp.update(_split_experts(name, values) if name.startswith(per_expert) else {name: values})
        else:
            full = name if name == "lm_head.weight" else prefix + name
            trunk.update(_split_experts(full, values) if name.startswith(per_expert) else {full: values})
    names = list(trunk)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: trunk[name].contiguous() for name in part}, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    if mtp:
        extra = "model_extra_tensors.safetensors"
        save_file({name: values.contiguous() for name, values in mtp.items()}, directory / extra)
        index |= dict.fromkeys(mtp, extra)
    total = sum(t.numel() * t.element_size() for t in (*trunk.values(), *mtp.values()))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (directory / INDEX).write_text(text + "\n")


def write_random_drafter(
    directory: Path, config: dict[str, Any], seed: int = 1, dtype: torch.dtype = torch.bfloat16
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with torch.device("meta"):
        drafter = DFlash(DFlashConfig.from_dict(config))
    tensors = {name: values.to(dtype) for name, values in random_tensors(drafter, False, seed)}
    save_file(tensors, directory / "model.safetensors")


def _split_experts(name: str, values: Tensor) -> dict[str, Tensor]:
    """experts.gate_up_proj -> experts.E.gate_proj.weight and up_proj.weight; other tensors as they are."""
    stem, kind = name.rsplit(".", 1)
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": values[e] for e in range(len(values))}
    if kind != "gate_up_proj":
        return {name: values}
    half = values.shape[1] // 2
    parts = {"gate_proj": values[:, :half], "up_proj": values[:, half:]}
    return {f"{stem}.{e}.{part}.weight": v[e] for e in range(len(values)) for part, v in parts.items()}
