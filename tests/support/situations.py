"""Miniature copies of checkpoints as they are published, and as they arrive broken.

Every function fills a directory and starts from the same random network: with one seed, the BF16, INT4, FP8 and
NVFP4 copies are quantisations of the same weights. The network is a Qwen3.5 hybrid of 4 layers (3 GatedDeltaNet, 1
attention) and 8 experts whose MTP head has 8 * 3 + 17 = 41 tensors, as the real one has 256 * 3 + 17 = 785.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.weights.checkpoint import INDEX
from stoker.weights.formats.base import WeightFormat
from stoker.weights.formats.fp8 import Fp8Block, Fp8Row
from stoker.weights.formats.int4 import Int4, pack_nibbles
from stoker.weights.formats.int4_ct import Int4Ct
from stoker.weights.formats.nvfp4 import Nvfp4, Nvfp4ModelOpt
from tests.support.random_checkpoint import small_config, write_random_checkpoint
from tests.support.tokenizer import write_byte_tokenizer

MTP_TENSORS = 41
EXTRA = "model_extra_tensors.safetensors"  # where AutoRound puts what it did not quantise
EXTRA_NVFP4 = "extra_weights.safetensors"
EXPERT = ("mlp.experts.",)
SHARED = ("mlp.shared_expert.",)
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DELTA = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj")
DELTA_GATES = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")

Tensors = dict[str, Tensor]
Quantize = Callable[[Tensor], WeightFormat]


@dataclass(frozen=True)
class Broken:
    """Where a situation went wrong, for a test to look for in the message."""

    file: str
    tensor: str


def config_of(vision: bool = True, **changes: Any) -> dict[str, Any]:
    """config.json of the network: the multimodal wrapper of the real releases, or the text part alone."""
    text = small_config(linear_num_value_heads=8) | changes
    if not vision:
        return text
    tied = text.pop("tie_word_embeddings")
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 32, "out_hidden_size": text["hidden_size"]},
    }


def bf16(directory: Path, *, seed: int = 0, vision: bool = True, fused_mtp: bool = False) -> None:
    """Qwen's own BF16 release: experts fused in the trunk, one by one in the MTP head (fused there too in 3.6)."""
    tensors = _weights(directory, seed, vision, fused_trunk=True, fused_mtp=fused_mtp)
    _write(directory, config_of(vision), tensors)


def intel_int4(directory: Path, *, group: int = 32, seed: int = 0, vision: bool = True, mtp: str = "listed") -> None:
    """Intel's AutoRound INT4: everything below `layers` but shared experts and routers, in_proj_a and _b included.

    MTP stays BF16 in model_extra_tensors.safetensors: `listed` in the index, `unlisted`, or `absent` altogether.
    """
    tensors = _weights(directory, seed, vision)
    layers = f"{_prefix(vision)}layers"

    def quantize(weight: Tensor) -> WeightFormat:
        return Int4.quantize(weight, group=group, clip_search=False)

    quantised = _quantised(tensors, layers, (*EXPERT, *ATTENTION, *DELTA, *DELTA_GATES), quantize)
    parts = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate")
    kept = [f"{layers}.{layer}.mlp.{part}" for layer in range(4) for part in parts]
    quantization = {
        "quant_method": "auto-round",
        "autoround_version": "0.12.0",
        "data_type": "int",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": layers,
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in kept},
    }
    config = config_of(vision) | {"quantization_config": quantization}
    trunk, head = _parted(quantised)
    _write(directory, config, trunk, extra=(EXTRA, {} if mtp == "absent" else head), list_extra=mtp == "listed")


def int4_index_without_mtp(directory: Path, **options: Any) -> None:
    """INT4 whose MTP file is there and whose index does not know it: what rebuilding an index by glob leaves."""
    intel_int4(directory, mtp="unlisted", **options)


def int4_index_with_everything(directory: Path, **options: Any) -> None:
    """INT4 whose index lists all 41 of 41 MTP tensors: nothing to do."""
    intel_int4(directory, mtp="listed", **options)


def int4_without_mtp(directory: Path, **options: Any) -> None:
    """INT4 whose config announces an MTP head that no file holds."""
    intel_int4(directory, mtp="absent", **options)


def qwen_fp8(directory: Path, *, seed: int = 0, vision: bool = True) -> None:
    """Qwen's own FP8 release: 128x128 blocks, experts one by one; DeltaNet, attention and MTP are FP8 too."""
    tensors = _weights(directory, seed, vision)
    fp8 = _quantised(tensors, "", (*EXPERT, *SHARED, *ATTENTION, *DELTA), Fp8Block.quantize)
    not_converted = ("lm_head", "embed_tokens", "conv1d", *DELTA_GATES, "mlp.gate", "shared_expert_gate", "mtp.fc")
    modules = [name.removesuffix(".weight") for name in fp8 if name.endswith(".weight")]
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [m for m in modules if m.endswith(not_converted) or "visual" in m],
    }
    config = config_of(vision) | {"quantization_config": quantization}
    _write(directory, config, fp8, shard_name="model.safetensors-{:05d}-of-{:05d}.safetensors")


def nvfp4_modelopt(directory: Path, *, seed: int = 0, vision: bool = True, zero_mtp: bool = False) -> None:
    """NVIDIA's NVFP4: only routed experts are quantised; MTP is BF16 in extra_weights.safetensors."""
    tensors = _weights(directory, seed, vision)
    prefix = _prefix(vision)
    quantised = _quantised(tensors, prefix, EXPERT, Nvfp4ModelOpt.quantize)
    for name in [name for name in quantised if name.endswith(".weight_scale_2")]:
        quantised[name.replace("weight_scale_2", "input_scale")] = torch.tensor(0.01)
    for name in quantised:
        if name.endswith(("A_log", "linear_attn.norm.weight")):  # fp32 in Qwen's release, not in this one
            quantised[name] = quantised[name].bfloat16()
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": [
            "lm_head",
            f"{prefix}embed_tokens",
            "model.visual*",
            "mtp*",
            *(f"{prefix}layers.{n}.{part}" for n in range(4) for part in ("linear_attn*", "self_attn*")),
            *(f"{prefix}layers.{n}.mlp.{part}" for n in range(4) for part in ("gate", "shared_expert*")),
        ],
    }
    trunk, head = _parted(quantised)
    if zero_mtp:
        head = {name: torch.zeros_like(values) for name, values in head.items()}
    _write(directory, config_of(vision) | {"quantization_config": quantization}, trunk, extra=(EXTRA_NVFP4, head))


def nvfp4_zeroed_mtp(directory: Path, **options: Any) -> None:
    """NVFP4 whose MTP head is all there, and all zeros: it loads, drafts, and is never accepted."""
    nvfp4_modelopt(directory, zero_mtp=True, **options)


def nvfp4_compressed_tensors(directory: Path, *, seed: int = 0, vision: bool = True) -> None:
    """llm-compressor's NVFP4: experts, shared experts and attention quantised, DeltaNet kept; no MTP head at all."""
    tensors = _weights(directory, seed, vision)
    quantised = _quantised(tensors, _prefix(vision), (*EXPERT, *SHARED, *ATTENTION), Nvfp4.quantize)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    ignore = ("linear_attn", "mlp[.]gate$", "shared_expert_gate", "lm_head", "embed_tokens", "visual")
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": [f"re:.*{name}.*" if not name.endswith("$") else f"re:.*{name}" for name in ignore],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    _write(directory, config_of(vision) | {"quantization_config": quantization}, _parted(quantised)[0])


def qwen_gptq(directory: Path, *, group: int = 32, seed: int = 0, vision: bool = True) -> None:
    """Qwen's own GPTQ-Int4: only routed experts are INT4, with g_idx; `dynamic` lists head and embedding with {}."""
    tensors = _weights(directory, seed, vision)
    prefix = _prefix(vision)

    def quantize(weight: Tensor) -> WeightFormat:
        found = Int4.quantize(weight, group=group, clip_search=False)
        return replace(found, g_idx=torch.arange(weight.shape[-1], dtype=torch.int32) // group)

    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "dynamic": {
            "lm_head": {},
            f"{prefix}embed_tokens": {},
            "-:.*attn.*": {},
            "-:.*shared_expert.*": {},
            "-:.*mtp.*": {},
            "-:.*visual.*": {},
        },
    }
    config = config_of(vision) | {"quantization_config": quantization}
    _write(directory, config, _quantised(tensors, f"{prefix}layers", EXPERT, quantize))


def int4_compressed_tensors(directory: Path, *, group: int | None = 32, seed: int = 0, vision: bool = True) -> None:
    """llm-compressor's W4A16 (pack-quantized), by group or by channel (None); attention in a second group, of FP8."""
    tensors = _weights(directory, seed, vision)
    prefix = f"{_prefix(vision)}layers"
    tensors = _quantised(tensors, prefix, EXPERT, lambda weight: pack_quantized(weight, group))
    tensors = _quantised(tensors, prefix, ATTENTION, fp8_row)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": [
            "lm_head",
            "re:.*linear_attn.*",
            "re:.*shared_expert.*",
            "re:.*mlp.gate$",
            "re:.*visual.*",
            "re:mtp.*",
        ],
        "config_groups": {
            "group_0": {"targets": ["re:.*mlp.experts.*", "Linear"], "weights": weights | {"group_size": group}},
            "group_1": {"targets": ["re:.*self_attn.[qk]_proj", "re:.*self_attn.[vo]_proj"], "weights": fp8},
        },
    }
    _write(directory, config_of(vision) | {"quantization_config": quantization}, tensors)


def pack_quantized(weight: Tensor, group: int | None) -> Int4Ct:
    """Symmetric round to nearest, by hand."""
    groups = weight.unflatten(-1, (-1, group or weight.shape[-1]))
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(-2) + 8
    words = pack_nibbles(codes.to(torch.uint8).T).T.contiguous()
    return Int4Ct(words, scale, torch.tensor(weight.shape))


def fp8_row(weight: Tensor) -> Fp8Row:
    scale = (weight.abs().amax(-1, keepdim=True) / 440).bfloat16()
    return Fp8Row((weight / scale.float()).to(torch.float8_e4m3fn), scale)


def shard_cut_short(directory: Path, *, missing: int = 64, **options: Any) -> Broken:
    """INT4 whose last shard lost its final `missing` bytes on the way."""
    intel_int4(directory, **options)
    shard = sorted(directory.glob("model-*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size - missing)
    last = max(_header(shard).items(), key=lambda item: item[1]["data_offsets"][1])[0]
    return Broken(shard.name, last)


def duplicated_tensor(directory: Path, **options: Any) -> Broken:
    """INT4 with one tensor a second time, in a file that a merge left behind."""
    intel_int4(directory, **options)
    shard = sorted(directory.glob("model-*.safetensors"))[0]
    name = next(iter(_header(shard)))
    save_file({name: load_file(shard)[name]}, directory / "model_leftover.safetensors")
    return Broken("model_leftover.safetensors", name)


def shape_off_by_one(directory: Path, *, seed: int = 0, vision: bool = True) -> Broken:
    """BF16 with a router of one expert too few: whole and readable, and not what config.json describes."""
    bf16(directory, seed=seed, vision=vision)
    name = f"{_prefix(vision)}layers.1.mlp.gate.weight"
    shard = next(file for file in directory.glob("*.safetensors") if name in _header(file))
    rewrite(shard, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    return Broken(shard.name, name)


def rewrite(file: Path, change: Callable[[Tensors], Any]) -> None:
    """Read a safetensors file, change its tensors in place, write it back; the index stays as it was."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _prefix(vision: bool) -> str:
    return "model.language_model." if vision else "model."


@contextmanager
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: on a busy machine, torch's threads spend far longer waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def _weights(directory: Path, seed: int, vision: bool, fused_trunk: bool = False, fused_mtp: bool = False) -> Tensors:
    """The BF16 network under its published names, by way of a scratch directory."""
    scratch = directory / "scratch"
    per_expert = tuple(part for part, fused in (("layers.", fused_trunk), ("mtp.", fused_mtp)) if not fused)
    write_random_checkpoint(scratch, config_of(False), seed=seed, prefix=_prefix(vision), per_expert=per_expert)
    tensors = {name: value for file in sorted(scratch.glob("*.safetensors")) for name, value in load_file(file).items()}
    shutil.rmtree(scratch)
    if vision:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (("patch_embed.proj", (32, 3, 2, 4, 4)), ("blocks.0.attn.qkv", (96, 32))):
            values = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
            tensors[f"model.visual.{name}.weight"] = values.bfloat16()
    return tensors


@one_thread()
def _quantised(tensors: Tensors, prefix: str, parts: Iterable[str], quantize: Quantize) -> Tensors:
    """Matrices below `prefix` whose names contain one of `parts`, as their format stores them; others as they are."""
    parts = tuple(parts)
    result: Tensors = {}
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and name.startswith(prefix) and any(part in name for part in parts):
            stored = quantize(values.float()).tensors()
            result |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
        else:
            result[name] = values
    return result


def _parted(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Trunk and MTP head."""
    head = {name: values for name, values in tensors.items() if name.startswith("mtp.")}
    return {name: values for name, values in tensors.items() if name not in head}, head


def _write(
    directory: Path,
    config: dict[str, Any],
    tensors: Tensors,
    extra: tuple[str, Tensors] = (EXTRA, {}),
    list_extra: bool = True,
    shard_name: str = "model-{:05d}-of-{:05d}.safetensors",
) -> None:
    write_byte_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    names = list(tensors)
    files = {shard_name.format(n + 1, 2): names[n * len(names) // 2 : (n + 1) * len(names) // 2] for n in range(2)}
    index = {name: file for file, part in files.items() for name in part}
    for file, part in files.items():
        save_file({name: tensors[name].contiguous() for name in part}, directory / file, metadata={"format": "pt"})
    extra_file, extra_tensors = extra
    if extra_tensors:
        save_file({n: t.contiguous() for n, t in extra_tensors.items()}, directory / extra_file)
        index |= dict.fromkeys(extra_tensors, extra_file) if list_extra else {}
    listed = {**tensors, **(extra_tensors if list_extra else {})}
    size = sum(values.nbytes for values in listed.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    (directory / INDEX).write_text(text + "\n")


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header
