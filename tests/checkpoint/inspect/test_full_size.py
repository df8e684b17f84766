"""The 122B INT4 release at full size, as far as headers go: right numbers, in a few megabytes of reading."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.inspect.report import Inspection, inspect
from stoker.weights.checkpoint import INDEX
from stoker.weights.headers import ITEM_SIZES
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import model_parameters, single_experts
from tests.weights.test_model_config import MODELS

CONFIG = MODELS["Qwen3.5-122B-A10B"][0]
TEXT, MTP, VISION = 122_111_526_912, 2_523_679_232, 451_290_864  # parameters
LAYERS = "model.language_model.layers"

Header = dict[str, tuple[str, tuple[int, ...]]]  # tensor -> dtype and shape


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    directory = tmp_path_factory.mktemp("intel-122b")
    write_intel_122b(directory)
    return inspect(directory)


def test_every_tensor_is_known_and_counted(report: Inspection) -> None:
    groups = {group.name: group for group in report.groups}
    assert sum(group.tensors for group in report.groups) == 112_901
    assert groups["MTP"].tensors == report.mtp.found == report.mtp.expected == 785
    assert groups["routed experts"].tensors == 48 * 256 * 3 * 3
    assert groups["vision"].tensors == 333
    assert report.parameters == TEXT + MTP + VISION
    assert (groups["MTP"].parameters, groups["vision"].parameters) == (MTP, VISION)
    assert groups["routed experts"].format == groups["DeltaNet"].format == groups["attention"].format == "int4-g128"
    assert groups["shared experts"].format == groups["head"].format == groups["MTP"].format == "bf16"


def test_a_step_reads_what_the_design_says(report: Inspection) -> None:
    assert report.step is not None
    gigabytes = {
        "routed experts": 1.87,
        "shared experts": 0.91,
        "DeltaNet": 1.66,
        "attention": 0.49,
        "head": 1.53,
        "DeltaNet state": 0.30,
    }
    for name, expected in gigabytes.items():
        assert report.step.items[name] / 1e9 == pytest.approx(expected, rel=0.02), name
    assert report.step.total / 1e9 == pytest.approx(6.8, rel=0.02)
    assert report.step.kv_bytes_per_token == 24_576
    # one MTP layer with 8 of 256 experts, and the head again
    assert report.step.draft_bytes / 1e9 == pytest.approx(1.526 + 2 * (MTP - 248 * 3 * 1024 * 3072) / 1e9, rel=0.001)


def test_only_headers_and_small_samples_are_read(report: Inspection) -> None:
    assert report.bytes_on_disk > 72e9
    assert report.bytes_read < 40e6
    assert 0 < report.mtp.sampled_bytes < 25e6


def test_the_only_thing_wrong_with_it_is_that_it_is_hollow(report: Inspection) -> None:
    (error,) = report.errors  # zero is a legal offset of its 7 norms
    assert error.message.startswith("778 of 785 MTP tensors are constant")
    assert report.mtp.complete
    assert report.mtp.sane is False


def write_intel_122b(directory: Path, shards: int = 14) -> None:
    """Intel's INT4 release of Qwen3.5-122B as far as headers go: 112,901 tensors, 77 GB, no disk space."""
    trunk, mtp = intel_122b_header()
    names = list(trunk)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_hollow(directory / file, {name: trunk[name] for name in part})
        index |= dict.fromkeys(part, file)
    write_hollow(directory / "model_extra_tensors.safetensors", mtp)
    index |= dict.fromkeys(mtp, "model_extra_tensors.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2))
    kept = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate")
    quantization = {
        "quant_method": "auto-round",
        "data_type": "int",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": LAYERS,
        "extra_config": {f"{LAYERS}.{n}.mlp.{name}": {"bits": 16} for n in range(48) for name in kept},
    }
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    (directory / "tokenizer.json").write_text("{}")


def intel_122b_header(group: int = 128) -> tuple[Header, Header]:
    """Trunk with vision, and MTP head."""
    trunk: Header = {f"model.visual.{name}": ("BF16", shape) for name, shape in vision_shapes(3072).items()}
    mtp: Header = {}
    for name, shape in model_parameters(ModelConfig.from_dict(CONFIG)).items():
        parts = single_experts(name, shape) if ".mlp.experts." in name else {name: shape}
        if name.startswith("mtp."):
            mtp |= {part: ("BF16", each) for part, each in parts.items()}
            continue
        for part, each in parts.items():
            full = part if part.startswith("lm_head") else f"model.language_model.{part}"
            if "_proj" in part and "shared_expert" not in part:
                module, (n_out, n_in) = full.removesuffix(".weight"), each
                trunk[f"{module}.qweight"] = ("I32", (n_in // 8, n_out))
                trunk[f"{module}.qzeros"] = ("I32", (n_in // group, n_out // 8))
                trunk[f"{module}.scales"] = ("F16", (n_in // group, n_out))
            else:
                fp32 = part.endswith(("A_log", "linear_attn.norm.weight"))
                trunk[full] = ("F32" if fp32 else "BF16", each)
    return trunk, mtp


def vision_shapes(
    text_hidden: int, depth: int = 27, hidden: int = 1152, inner: int = 4304
) -> dict[str, tuple[int, ...]]:
    """The 333 tensors of the vision tower, which Stoker does not use."""
    shapes: dict[str, tuple[int, ...]] = {"pos_embed.weight": (2304, hidden)}
    linears: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (hidden, 3, 2, 16, 16),
        "merger.norm": (hidden,),
        "merger.linear_fc1": (4 * hidden, 4 * hidden),
        "merger.linear_fc2": (text_hidden, 4 * hidden),
    }
    for n in range(depth):
        linears |= {
            f"blocks.{n}.norm1": (hidden,),
            f"blocks.{n}.norm2": (hidden,),
            f"blocks.{n}.attn.qkv": (3 * hidden, hidden),
            f"blocks.{n}.attn.proj": (hidden, hidden),
            f"blocks.{n}.mlp.linear_fc1": (inner, hidden),
            f"blocks.{n}.mlp.linear_fc2": (hidden, inner),
        }
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def write_hollow(path: Path, header: Header) -> None:
    """A safetensors file with this header, whose data is a hole that reads as zeros."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in header.items():
        begin, end = end, end + prod(shape) * ITEM_SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
