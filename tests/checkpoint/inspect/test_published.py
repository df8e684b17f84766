"""Checkpoints as they are published: what `inspect` says of each, and what it says of formats that are not read."""

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.backends.network.load import load_model
from stoker.checkpoint.inspect.report import Inspection, inspect
from stoker.errors import CheckpointError
from stoker.weights.checkpoint import Checkpoint
from tests.support import situations

INSTEAD = "stoker build --base BF16_DIR --quantize int4"


def formats(report: Inspection) -> dict[str, str]:
    return {group.name: group.format for group in report.groups}


def test_qwens_gptq_release_has_int4_experts_and_a_16_bit_head(tmp_path: Path) -> None:
    situations.qwen_gptq(tmp_path)
    report = inspect(tmp_path)
    assert not report.errors
    assert all("lm_head" not in p.message and "embed_tokens" not in p.message for p in report.problems)
    found = formats(report)
    assert (found["routed experts"], found["head"], found["embedding"]) == ("int4-g32", "bf16", "bf16")
    assert report.mtp.sane


def test_compressed_tensors_int4_and_fp8_per_channel_are_read(tmp_path: Path) -> None:
    situations.int4_compressed_tensors(tmp_path)
    report = inspect(tmp_path)
    assert not report.errors
    found = formats(report)
    assert found["routed experts"] == "int4-ct-g32"
    assert "fp8-row" in found["attention"]


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"] |= changes
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"quant_method": "awq"}, "quant_method awq"),
        ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes"),
        ({"quant_method": "mxfp4"}, "quant_method mxfp4"),
        ({"quant_method": "exl3"}, "quant_method exl3"),
        ({"format": "marlin-24"}, "format marlin-24"),
    ],
)
def test_a_format_that_is_not_read_is_named_with_what_to_use_instead(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    situations.int4_compressed_tensors(tmp_path)
    change_config(tmp_path, **changes)
    (error,) = inspect(tmp_path).errors
    assert name in error.message
    assert INSTEAD in str(error.fix)
    assert "again" not in str(error.fix)
    with pytest.raises(CheckpointError, match=f"{name}.*{INSTEAD}"):
        load_model(tmp_path)


def test_packed_int8_is_named_and_not_taken_for_int4(tmp_path: Path) -> None:
    situations.int4_compressed_tensors(tmp_path)
    group = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    change_config(tmp_path, config_groups={"g": {"targets": ["Linear"], "weights": group}}, format="pack-quantized")
    errors = inspect(tmp_path).errors
    assert any("int 8 bit per group" in error.message and INSTEAD in str(error.fix) for error in errors)
    assert not any("again" in str(error.fix) for error in errors)


def test_a_folder_of_gguf_is_named_and_no_download_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    fixes = [problem.fix for problem in inspect(tmp_path).errors if "GGUF" in problem.message]
    assert len(fixes) == 1
    assert INSTEAD in str(fixes[0])
    with pytest.raises(CheckpointError, match="GGUF"):
        Checkpoint.open(tmp_path)
