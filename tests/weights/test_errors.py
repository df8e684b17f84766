"""What is wrong with a checkpoint directory is said in one line that names file, tensor, expected and found."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker.backends.network.load import load_model
from stoker.errors import CheckpointError, ConfigError, StokerError
from stoker.weights.checkpoint import INDEX
from stoker.weights.dflash_config import DFlashConfig
from tests.support.random_checkpoint import (
    small_config,
    small_drafter_config,
    write_random_checkpoint,
    write_random_drafter,
)

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
MTP_FILE = "model_extra_tensors.safetensors"
CONFIG = small_config(hidden_size=32, vocab_size=64, head_dim=16, num_experts=4, num_experts_per_tok=2)
CONFIG |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
CONFIG |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    write_random_checkpoint(directory, CONFIG)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of a sound checkpoint, for a test to damage."""
    return shutil.copytree(whole, tmp_path / "model")


def refusal(
    directory: Path, kind: type[StokerError] = CheckpointError, load: Callable[[Path], Any] = load_model
) -> str:
    """What the user reads: one line, a sentence or two."""
    with pytest.raises(kind) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert len(message) < 600
    return message


def assert_names(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrites every file with `change` applied; the index goes, so that only the headers speak."""
    (directory / INDEX).unlink()
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


def edit_config(directory: Path, drop: str = "", **changes: Any) -> None:
    config = {name: value for name, value in (CONFIG | changes).items() if name != drop}
    (directory / "config.json").write_text(json.dumps(config))


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def home_of(directory: Path, tensor: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


def test_the_sound_checkpoint_loads(model: Path) -> None:
    assert load_model(model).notes == []


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("lm_head.weight", [64, 32]),
        ("model.norm.weight", [32]),
        ("model.layers.0.linear_attn.A_log", [4]),
        ("model.layers.1.mlp.experts.gate_up_proj", [4, 32, 32]),
        ("model.layers.3.self_attn.q_proj.weight", [128, 32]),
    ],
)
def test_a_missing_tensor_is_named_with_its_shape(model: Path, tensor: str, shape: list[int]) -> None:
    edit_tensors(model, lambda tensors: tensors.pop(tensor, None))
    assert_names(refusal(model), model, tensor, shape)


def test_a_missing_embedding_is_named(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.pop("model.embed_tokens.weight", None))
    assert_names(refusal(model), model, "model.embed_tokens.weight")


@pytest.mark.parametrize("tensor", ["fc.weight", "layers.0.mlp.experts.2.up_proj.weight", "norm.weight"])
def test_a_partial_mtp_head_is_an_error_with_the_way_out(model: Path, tensor: str) -> None:
    edit_tensors(model, lambda tensors: tensors.pop(f"mtp.{tensor}", None))
    left = len(load_file(model / MTP_FILE))
    assert_names(refusal(model), model, f"mtp.{tensor}", "MTP head is incomplete", left, "remove all mtp.* tensors")


def test_the_first_of_single_experts_missing_is_named_as_itself(model: Path) -> None:
    """The others lie there one by one, so nobody is looking for a fused tensor."""
    edit_tensors(model, lambda tensors: tensors.pop("mtp.layers.0.mlp.experts.0.gate_proj.weight", None))
    assert_names(refusal(model), "mtp.layers.0.mlp.experts.0.gate_proj.weight", [16, 32])


def test_no_mtp_head_at_all_is_only_a_note(model: Path) -> None:
    (model / MTP_FILE).unlink()
    edit_index(model, lambda listed: [listed.pop(name) for name in list(listed) if name.startswith("mtp.")])
    loaded = load_model(model)
    assert loaded.model.mtp is None
    [note] = loaded.notes
    assert "MTP" in note


@pytest.mark.parametrize("tensor", ["model.layers.0.mlp.gate.weight", "mtp.fc.weight", "model.embed_tokens.weight"])
def test_a_wrong_shape_names_file_tensor_expected_and_found(model: Path, tensor: str) -> None:
    file = home_of(model, tensor)
    right = list(load_file(file)[tensor].shape)
    wrong = [right[0], right[1] + 8]
    edit_tensors(model, lambda tensors: tensor in tensors and tensors.update({tensor: torch.zeros(wrong)}))
    assert_names(refusal(model), file, tensor, right, wrong)


@pytest.mark.parametrize("part", [0.001, 0.5, 0.999])
def test_a_truncated_shard_names_the_file(model: Path, part: float) -> None:
    file = model / SHARDS[1]
    data = file.read_bytes()
    size = int(part * len(data))
    file.write_bytes(data[:size])
    assert_names(refusal(model), file, f"{size:,}")


STORED = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F64": torch.float64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("stored", STORED)
def test_a_weight_in_no_16_or_32_bit_float_is_not_cast_silently(model: Path, stored: str) -> None:
    """Such numbers mean nothing without their scales: file, layer, and dtype or missing scale are named instead."""
    layer = "model.layers.0.mlp.gate"
    tensor = f"{layer}.weight"
    file, dtype = home_of(model, tensor), STORED[stored]
    edit_tensors(model, lambda tensors: tensor in tensors and tensors.update({tensor: tensors[tensor].to(dtype)}))
    message = refusal(model)
    assert_names(message, file, layer)
    assert f"weight {stored}" in message or "weight_scale" in message


def test_an_unknown_extra_tensor_is_not_dropped_silently(model: Path) -> None:
    save_file({"model.layers.9.mlp.gate.weight": torch.zeros(4, 32)}, model / "other.safetensors")
    message = refusal(model)
    assert_names(message, model / "other.safetensors", "model.layers.9.mlp.gate.weight", [4, 32], "F32")


def test_vision_tensors_are_skipped_and_that_is_said_once(model: Path) -> None:
    vision = {f"model.visual.blocks.{i}.attn.qkv.weight": torch.zeros(4, 4) for i in range(5)}
    save_file(vision, model / "vision.safetensors")
    edit_index(model, lambda listed: listed.update(dict.fromkeys(vision, "vision.safetensors")))
    [note] = load_model(model).notes
    assert_names(note, "5 vision tensors not used")


def test_a_tensor_in_two_files_names_both(model: Path) -> None:
    shutil.copy(model / SHARDS[0], model / "old.safetensors")
    message = refusal(model)
    assert_names(message, SHARDS[0], "old.safetensors", model)
    assert any(tensor in message for tensor in load_file(model / SHARDS[0]))


def test_an_index_that_names_a_missing_file(model: Path) -> None:
    count = len(load_file(model / SHARDS[1]))
    (model / SHARDS[1]).unlink()
    assert_names(refusal(model), model / INDEX, SHARDS[1], f"{count} tensors")


def test_an_index_that_names_a_tensor_nobody_holds(model: Path) -> None:
    edit_index(model, lambda listed: listed.update({"model.layers.7.mlp.gate.weight": SHARDS[0]}))
    assert_names(refusal(model), model / INDEX, "model.layers.7.mlp.gate.weight", SHARDS[0])


def test_an_index_that_names_the_wrong_file(model: Path) -> None:
    edit_index(model, lambda listed: listed.update({"model.embed_tokens.weight": SHARDS[1]}))
    assert_names(refusal(model), model / INDEX, "model.embed_tokens.weight", SHARDS[0], SHARDS[1])


def test_an_index_without_a_weight_map(model: Path) -> None:
    (model / INDEX).write_text("{}")
    assert_names(refusal(model), model / INDEX, "weight_map")


@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json"])
def test_a_json_syntax_error_names_file_line_and_column(model: Path, name: str) -> None:
    (model / name).write_text('{\n  "weight_map": {},\n    oops\n}\n')
    assert_names(refusal(model, StokerError), model / name, "line 3", "column 5")


@pytest.mark.parametrize("content", [b"[1, 2]", b'"text"', b"null", "{}".encode("utf-16"), b"", b"\xff{}"])
def test_a_config_that_is_no_json_object_names_the_file(model: Path, content: bytes) -> None:
    (model / "config.json").write_bytes(content)
    assert_names(refusal(model, ConfigError), model / "config.json")


def test_an_unknown_model_type_names_it_and_the_known_ones(model: Path) -> None:
    edit_config(model, model_type="llama")
    assert_names(refusal(model, ConfigError), model / "config.json", "'llama'", "qwen3_5_moe", "qwen3_moe")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": YARN | {"rope_theta": 1e7}},
        {"rope_parameters": None, "rope_theta": 1e7, "rope_scaling": YARN},
        {"rope_parameters": None, "rope_theta": 1e7, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": YARN},  # as model cards tell people to add it, beside rope_parameters
    ],
    ids=["rope_parameters", "rope_scaling", "type", "both"],
)
def test_yarn_is_refused_wherever_the_config_says_so(model: Path, changes: dict[str, Any]) -> None:
    edit_config(model, **changes)
    assert_names(refusal(model, ConfigError), model / "config.json", "rope_type", "'yarn'", "'default'", 8192)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_yarn_is_refused_in_a_drafter_too(tmp_path: Path, key: str) -> None:
    config = small_drafter_config(CONFIG)
    write_random_drafter(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": {key: "yarn", "rope_theta": 1e7}}))
    assert_names(refusal(tmp_path, ConfigError, DFlashConfig.load), tmp_path / "config.json", "'yarn'", "'default'")


SIZES = ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
MORE_SIZES = ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "linear_num_value_heads"]


@pytest.mark.parametrize("field", [*SIZES, *MORE_SIZES, "max_position_embeddings"])
def test_a_missing_field_is_named(model: Path, field: str) -> None:
    edit_config(model, drop=field)
    assert_names(refusal(model, ConfigError), model / "config.json", field, "missing")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok is 5", "num_experts 4"]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok is 0", "at least 1"]),
        ({"layer_types": ["full_attention"] * 3}, ["layer_types has 3", "num_hidden_layers is 4"]),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, ["layer_types[3]", "'mamba'", "'linear_attention'"]),
        ({"hidden_size": "32"}, ["hidden_size", "'32'"]),
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "0"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"full_attention_interval": 0}, ["full_attention_interval", "0"]),
        ({"linear_num_key_heads": 0}, ["linear_num_key_heads", "0"]),
        ({"rope_parameters": "default"}, ["rope_parameters", "'default'"]),
        ({"mtp_num_hidden_layers": 2}, ["mtp_num_hidden_layers is 2"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias", "True", "False"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_field_that_cannot_be_right_is_named_with_its_value(
    model: Path, changes: dict[str, Any], named: list[str]
) -> None:
    edit_config(model, **changes)
    assert_names(refusal(model, ConfigError), model / "config.json", *named)


def test_a_config_dtype_stoker_does_not_compute_in(model: Path) -> None:
    edit_config(model, dtype="float8_e4m3fn")
    assert_names(refusal(model, StokerError), "config.json", "'float8_e4m3fn'", "bfloat16")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickle_weights_are_refused_unopened(tmp_path: Path, name: str) -> None:
    edit_config(tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'echo never run'\ntR.")
    assert_names(refusal(tmp_path), tmp_path, name, "pickle", "safetensors")


def test_a_directory_without_weights(tmp_path: Path) -> None:
    edit_config(tmp_path)
    assert_names(refusal(tmp_path), tmp_path, "no *.safetensors")


def test_an_empty_directory_or_none_at_all(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        assert_names(refusal(directory, StokerError), directory)


def test_a_download_that_left_a_dangling_link_behind(model: Path) -> None:
    """As an interrupted fetch into a shared cache does."""
    (model / SHARDS[1]).unlink()
    (model / SHARDS[1]).symlink_to(model / "blobs" / "gone")
    assert_names(refusal(model), model / SHARDS[1])
