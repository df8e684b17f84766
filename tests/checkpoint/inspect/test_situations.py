"""Each of the situations checkpoints arrive in is named, with the file, the tensor and the way out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.backends.network.load import load_model
from stoker.checkpoint.inspect.report import Inspection, inspect
from stoker.errors import CheckpointError, StokerError
from stoker.weights.checkpoint import INDEX
from tests.support import situations
from tests.support.situations import Tensors, rewrite

LAYERS = "model.language_model.layers"
Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def intel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("intel")
    situations.intel_int4(directory)
    return directory


def formats(report: Inspection) -> dict[str, str]:
    return {group.name: group.format for group in report.groups}


def errors(report: Inspection) -> list[str]:
    return [problem.message for problem in report.errors]


def notes(report: Inspection) -> str:
    return "\n".join(problem.message for problem in report.problems if problem.severity == "note")


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (situations.bf16, {"routed experts": "bf16", "MTP": "bf16", "DeltaNet": "bf16"}),
        (situations.intel_int4, {"routed experts": "int4-g32", "shared experts": "bf16", "attention": "int4-g32"}),
        (situations.qwen_fp8, {"routed experts": "fp8-b128", "shared experts": "fp8-b128", "MTP": "fp8-b128 + bf16"}),
        (situations.nvfp4_modelopt, {"routed experts": "nvfp4-modelopt", "DeltaNet": "bf16", "MTP": "bf16"}),
    ],
)
def test_whole_checkpoints_are_usable(write: Change, expected: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path)
    report = inspect(tmp_path)
    assert not report.errors
    assert formats(report).items() >= expected.items()
    assert (report.mtp.present, report.mtp.complete, report.mtp.sane) == (True, True, True)
    assert report.mtp.found == situations.MTP_TENSORS
    assert report.verdict == "Usable, MTP drafting included."
    assert all(problem.fix for problem in report.problems)


def test_the_same_network_has_the_same_parameters_in_every_format(tmp_path: Path) -> None:
    counts = set()
    for write in (situations.bf16, situations.intel_int4, situations.qwen_fp8, situations.nvfp4_modelopt):
        write(tmp_path / write.__name__)
        counts.add(inspect(tmp_path / write.__name__).parameters)
    assert len(counts) == 1


def test_fused_mtp_experts_are_complete_too(tmp_path: Path) -> None:
    situations.bf16(tmp_path, fused_mtp=True)
    mtp = inspect(tmp_path).mtp
    assert (mtp.complete, mtp.sane, mtp.found, mtp.expected) == (True, True, 19, 19)


def test_an_index_that_lacks_mtp_is_noted(tmp_path: Path) -> None:
    situations.int4_index_without_mtp(tmp_path)
    report = inspect(tmp_path)
    assert not report.errors
    assert report.mtp.complete
    note = next(problem for problem in report.problems if INDEX in problem.message)
    assert note.message.startswith("41 tensors of model_extra_tensors.safetensors (41 of them MTP) are missing")
    assert "stoker build" in note.fix


@pytest.mark.parametrize("write", [situations.int4_without_mtp, situations.nvfp4_compressed_tensors])
def test_a_missing_mtp_head_is_noted(write: Change, tmp_path: Path) -> None:
    write(tmp_path)
    report = inspect(tmp_path)
    assert not report.errors
    assert (report.mtp.present, report.mtp.complete, report.mtp.sane) == (False, False, None)
    assert "announces an MTP head, but all 41 MTP tensors are missing" in notes(report)
    assert report.verdict == "Usable, without MTP drafting."


def test_a_zeroed_mtp_head_is_not_sane(tmp_path: Path) -> None:
    situations.nvfp4_zeroed_mtp(tmp_path)
    report = inspect(tmp_path)
    assert (report.mtp.complete, report.mtp.sane) == (True, False)
    (error,) = report.errors
    assert (
        error.message == "34 of 41 MTP tensors are constant where sampled, first mtp.fc.weight (0)."
    )  # zero norms are legal
    assert error.file == situations.EXTRA_NVFP4
    assert "--mtp" in error.fix


def test_a_shard_cut_short_is_named_with_its_bytes(tmp_path: Path) -> None:
    broken = situations.shard_cut_short(tmp_path)
    size = (tmp_path / broken.file).stat().st_size
    (error,) = inspect(tmp_path).errors
    assert error.message == (
        f"{broken.file} is cut short: its header needs {size + 64:,} bytes and it has {size:,}, "
        f"so 1 tensor is not whole, first {broken.tensor}."
    )
    assert (error.file, error.tensor, error.fix) == (broken.file, broken.tensor, f"Fetch {broken.file} again.")


def test_a_duplicated_tensor_is_named_with_both_files(tmp_path: Path) -> None:
    broken = situations.duplicated_tensor(tmp_path)
    (error,) = inspect(tmp_path).errors
    assert error.message.startswith(f"1 tensor is in both model-00001-of-00002.safetensors and {broken.file}")
    assert (error.file, error.tensor) == (broken.file, broken.tensor)


def test_a_shape_off_by_one_is_named_with_both_shapes(tmp_path: Path) -> None:
    broken = situations.shape_off_by_one(tmp_path)
    (error,) = inspect(tmp_path).errors
    assert error.message == f"{broken.tensor} has shape [7, 128], config.json asks for [8, 128]."
    assert (error.file, error.tensor) == (broken.file, broken.tensor)


def test_all_problems_are_collected_not_only_the_first(tmp_path: Path) -> None:
    situations.shard_cut_short(tmp_path)
    rewrite(tmp_path / situations.EXTRA, lambda t: [t.pop(n) for n in list(t)[:3]])
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    for path in tmp_path.glob("tokenizer*"):
        path.unlink()
    text = "\n".join(errors(inspect(tmp_path)))
    for part in ("cut short", "3 of 41 MTP tensors missing", "Git LFS pointer", "no tokenizer", "that no file holds"):
        assert part in text


# ---- what the loader refuses, inspect must have named ----


def edit_config(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config["text_config"] |= changes
        path.write_text(json.dumps(config))

    return change


def edit_quantization(**changes: Any) -> Change:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] |= changes
        path.write_text(json.dumps(config))

    return change


def edit_index(change: Callable[[dict[str, str]], Any]) -> Change:
    def edit(directory: Path) -> None:
        path = directory / INDEX
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return edit


def edit_tensor(name: str, change: Callable[[Tensors, str], Any]) -> Change:
    def edit(directory: Path) -> None:
        for file in directory.glob("*.safetensors"):
            rewrite(file, lambda tensors: change(tensors, name) if name in tensors else None)

    return edit


def delete(tensors: Tensors, name: str) -> None:
    del tensors[name]


def cast(dtype: torch.dtype) -> Callable[[Tensors, str], None]:
    def change(tensors: Tensors, name: str) -> None:
        tensors[name] = tensors[name].to(dtype)

    return change


def duplicate(tensors: Tensors, name: str) -> None:
    tensors["extra.weight"] = tensors[name].clone()


def shorten(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def remove_weights(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        file.unlink()


EXPERT = f"{LAYERS}.0.mlp.experts.3.up_proj"
REFUSED: dict[str, tuple[Change, str]] = {
    "scales missing": (edit_tensor(f"{EXPERT}.scales", delete), "scales is missing"),
    "an expert missing": (
        lambda d: [edit_tensor(f"{EXPERT}.{s}", delete)(d) for s in ("qweight", "scales", "qzeros")],
        "1 of 96 routed experts tensors missing, first " + EXPERT,
    ),
    "scales of the wrong dtype": (edit_tensor(f"{EXPERT}.scales", cast(torch.float32)), "scales is F32, expected F16"),
    "scales of the wrong shape": (edit_tensor(f"{EXPERT}.scales", shorten), "inputs in 3 groups"),
    "norm of the wrong shape": (edit_tensor(f"{LAYERS}.2.input_layernorm.weight", shorten), "asks for [128]"),
    "norm of the wrong dtype": (edit_tensor(f"{LAYERS}.2.input_layernorm.weight", cast(torch.int64)), "no form Stoker"),
    "norm missing": (edit_tensor("model.language_model.norm.weight", delete), "1 of 9 norms tensors missing"),
    "embedding missing": (edit_tensor("model.language_model.embed_tokens.weight", delete), "1 of 1 embedding"),
    "head missing": (edit_tensor("lm_head.weight", delete), "1 of 1 head tensors missing"),
    "part of MTP missing": (edit_tensor("mtp.fc.weight", delete), "1 of 41 MTP tensors missing, first mtp.fc"),
    "an extra tensor": (edit_tensor("lm_head.weight", duplicate), "1 unknown tensors have no place"),
    "a layer too many": (edit_config(num_hidden_layers=3), "have no place in this model"),
    "a layer too few": (edit_config(num_hidden_layers=5), "missing, first"),
    "another hidden size": (edit_config(hidden_size=160), "config.json asks for"),
    "an unknown family": (lambda d: (d / "config.json").write_text('{"model_type": "gpt_oss"}'), "'gpt_oss'"),
    "a scaled rope": (edit_config(rope_parameters={"rope_type": "yarn"}), "rope_type is 'yarn'"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "another group size": (edit_quantization(group_size=64), "says int4-g64"),
    "a rule that is no rule": (edit_quantization(extra_config={"lm_head": 16}), "expected an object"),
    "an unknown method": (edit_quantization(quant_method="bitsandbytes"), "quant_method bitsandbytes"),
    "a file missing": (lambda d: (d / situations.EXTRA).unlink(), "41 tensors in model_extra_tensors.safetensors"),
    "a file emptied": (lambda d: (d / situations.EXTRA).write_bytes(b""), "not a whole safetensors file"),
    "a header that is no JSON": (
        lambda d: (d / situations.EXTRA).write_bytes((9).to_bytes(8, "little") + b"x" * 9), "is not JSON",
    ),
    "index names absent tensors": (edit_index(lambda m: m.update({"a.b": situations.EXTRA})), "that no file holds"),
    "index names another file": (
        edit_index(lambda m: m.update({"mtp.fc.weight": "model-00001-of-00002.safetensors"})), "belong to",
    ),
    "index without a map": (lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
    "only pickles": (
        lambda d: [f.rename(f.with_suffix(".bin")) for f in d.glob("*.safetensors")], "only pickle weights",
    ),
    "no weights": (remove_weights, "no *.safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_the_loader_refuses_is_an_error_here(name: str, intel: Path, tmp_path: Path) -> None:
    change, sentence = REFUSED[name]
    directory = Path(shutil.copytree(intel, tmp_path / "copy"))
    change(directory)
    with pytest.raises(StokerError) as caught:
        load_model(directory)
    report = inspect(directory)
    assert any(message.rstrip(".") in str(caught.value) for message in errors(report)), "in other words"
    assert any(sentence in message for message in errors(report)), errors(report)
    assert len(report.errors) <= 12, "like faults are one problem"
    assert all(problem.fix for problem in report.errors)


def test_experts_of_one_layer_in_two_formats_are_refused_by_both(tmp_path: Path) -> None:
    situations.bf16(tmp_path)
    mixed = "mtp.layers.0.mlp.experts.5.up_proj.weight"
    edit_tensor(mixed, cast(torch.float16))(tmp_path)
    with pytest.raises(CheckpointError, match="must share one format"):
        load_model(tmp_path)
    assert any(
        f"{mixed} is stored as fp16, unlike the first expert" in message for message in errors(inspect(tmp_path))
    )


@pytest.mark.parametrize(
    "write",
    [situations.bf16, situations.intel_int4, situations.int4_without_mtp, situations.qwen_fp8,
     situations.nvfp4_modelopt, situations.nvfp4_compressed_tensors, situations.int4_index_without_mtp],
)  # fmt: skip
def test_whatever_is_called_usable_loads(write: Change, tmp_path: Path) -> None:
    write(tmp_path)
    assert not inspect(tmp_path).errors
    load_model(tmp_path)


def test_a_directory_that_is_none_is_the_only_thing_that_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        inspect(tmp_path / "nowhere")
    report = inspect(tmp_path)
    assert "There is no *.safetensors file here." in errors(report)


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"])
def test_every_family_is_described(family: str, checkpoints: dict[str, Path]) -> None:
    report = inspect(checkpoints[family])
    assert not report.errors
    assert report.architecture == family.removesuffix("_text")
    assert report.mtp.present == (family != "qwen3_moe")
    assert report.mtp.sane is (True if report.mtp.present else None)
    assert ("dense MLP" in formats(report)) == (family == "qwen3_5_text")
