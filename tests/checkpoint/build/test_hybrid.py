"""The fast checkpoint from published ones: INT4 base, FP8 shared experts, INT8 head, MTP head, DFlash drafter."""

import json
from pathlib import Path

import pytest
import torch

from stoker.backends.network.load import load_drafter, load_model
from stoker.checkpoint.build import BuildOptions, build
from stoker.errors import CheckpointError, StokerError
from stoker.weights.checkpoint import INDEX, Checkpoint
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.model_config import ModelConfig
from tests.checkpoint.build.conftest import CopyOf, Published
from tests.checkpoint.build.result import formats, tensor, weight
from tests.support import situations

LAYER = "model.language_model.layers.0"
SHARED = f"{LAYER}.mlp.shared_expert.gate_proj"


def _set(tensors: dict[str, torch.Tensor], name: str, value: float) -> None:
    tensors[name].fill_(value)


def _drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def rules_of(options: BuildOptions, out: Path) -> dict[str, list[str]]:
    return build(options, out).rules


def test_each_part_comes_from_where_the_options_say(published: Published, out: Path) -> None:
    base, fp8, bf16 = published("intel_int4"), published("qwen_fp8"), published("bf16")
    options = BuildOptions(base, shared_experts=fp8, lm_head="int8", mtp=bf16, drafter=published("drafter"))
    report = build(options, out)
    stored = formats(out)
    assert stored[SHARED] == "fp8-b128"
    assert stored["lm_head"] == "int8-row"
    assert stored[f"{LAYER}.mlp.experts.3.up_proj"] == stored[f"{LAYER}.linear_attn.in_proj_a"] == "int4-g32"
    for name, origin in (
        (f"{SHARED}.weight", fp8),
        (f"{SHARED}.weight_scale_inv", fp8),
        ("mtp.fc.weight", bf16),
        (f"{LAYER}.mlp.experts.3.up_proj.qweight", base),
        ("model.visual.blocks.0.attn.qkv.weight", base),
    ):
        assert torch.equal(tensor(out, name).view(torch.uint8), tensor(origin, name).view(torch.uint8)), name
    head = weight(out, "lm_head")
    expected = Int8Row.quantize(tensor(base, "lm_head.weight"))
    assert torch.equal(head.dequantize(), expected.dequantize())
    assert tensor(out, "lm_head.weight_scale").shape == (512, 1)
    assert report.rules["--base"] == [
        f"41 tensors replaced: the MTP head comes from {bf16}",
        f"12 tensors replaced: shared experts come from {fp8}",
        "379 tensors copied unchanged",
        "1 tensor quantised to int8-row",
    ]
    assert report.rules["--shared-experts"][1].startswith(
        "331 tensors not used: this build takes only shared experts (192 routed experts, "
    )
    loaded = load_model(out)
    assert loaded.model.mtp is not None
    load_drafter(out / "drafter", loaded.config)


def test_the_config_names_every_layer_that_is_not_int4(published: Published, out: Path) -> None:
    build(BuildOptions(published("intel_int4"), shared_experts=published("qwen_fp8"), lm_head="int8"), out)
    extra = json.loads((out / "config.json").read_text())["quantization_config"]["extra_config"]
    assert extra[SHARED] == {"bits": 8, "data_type": "fp8", "group_size": [128, 128]}
    assert extra["lm_head"] == {"bits": 8, "data_type": "int", "group_size": -1}
    assert extra[f"{LAYER}.mlp.gate"] == {"bits": 16, "data_type": "float"}


def test_small_files_come_along_and_pickles_never_do(copy_of: CopyOf, out: Path) -> None:
    base = copy_of("bf16")
    (base / "pytorch_model.bin").write_bytes(b"\x80\x04 code")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "quantize_config.json").write_text("{}")
    rules = rules_of(BuildOptions(str(base)), out)
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"} <= {
        path.name for path in out.iterdir()
    }
    assert not list(out.glob("*.bin"))
    assert not (out / "quantize_config.json").exists()
    assert rules["files"] == [
        "quantize_config.json not copied: config.json says what is quantised",
        "pytorch_model.bin not copied: only safetensors weights, tokenizer and text files are taken",
    ]


@pytest.mark.parametrize(
    ("situation", "line"),
    [
        ("int4_index_with_everything", "41 of 41 MTP tensors already mapped: nothing to do"),
        (
            "int4_index_without_mtp",
            "0 of 41 MTP tensors are mapped in the index of the base; the new index maps them all",
        ),
    ],
)
def test_mtp_mappings_always_survive(published: Published, out: Path, situation: str, line: str) -> None:
    assert rules_of(BuildOptions(published(situation)), out)["MTP"] == [line]
    mapped = json.loads((out / INDEX).read_text())["weight_map"]
    assert set(mapped) == set(Checkpoint.open(out).tensors)
    assert sum(name.startswith("mtp.") for name in mapped) == situations.MTP_TENSORS


def test_a_base_without_mtp_is_built_and_says_so(published: Published, out: Path) -> None:
    (line,) = rules_of(BuildOptions(published("int4_without_mtp")), out)["MTP"]
    assert "announces an MTP head, but the base has no mtp.* tensors" in line
    assert "--mtp" in line


def test_an_fp8_mtp_head_is_described_layer_by_layer(published: Published, out: Path) -> None:
    build(BuildOptions(published("int4_without_mtp"), mtp=published("qwen_fp8")), out)
    stored = formats(out)
    assert stored["mtp.layers.0.mlp.experts.7.down_proj"] == "fp8-b128"
    assert stored["mtp.fc"] == "bf16"
    assert load_model(out).model.mtp is not None


def test_a_head_the_config_forgot_is_kept_and_announced(tmp_path: Path, out: Path) -> None:
    base = tmp_path / "base"
    situations.bf16(base, vision=False)
    raw = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(raw | {"mtp_num_hidden_layers": 0}))
    build(BuildOptions(str(base)), out)
    assert ModelConfig.load(out).mtp_layers == 1


def test_a_zeroed_mtp_head_is_refused_and_replaced_on_request(published: Published, out: Path) -> None:
    base = published("nvfp4_zeroed_mtp")
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight in .* is 0 everywhere.*--mtp DIR"):
        build(BuildOptions(base), out)
    assert not out.exists()
    assert not out.with_name("built.partial").exists()
    build(BuildOptions(base, mtp=published("bf16")), out)
    assert torch.equal(tensor(out, "mtp.fc.weight"), tensor(published("bf16"), "mtp.fc.weight"))


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_one_dead_matrix_is_enough(copy_of: CopyOf, out: Path, value: float) -> None:
    base = copy_of("intel_int4")
    name = "mtp.layers.0.mlp.experts.5.up_proj.weight"
    situations.rewrite(base / situations.EXTRA, lambda tensors: _set(tensors, name, value))
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj.* (is 0\.5 everywhere|holds NaN or Inf)"):
        build(BuildOptions(str(base)), out)


@pytest.mark.parametrize(
    ("situation", "message"),
    [
        ("shard_cut_short", r"is cut short: its header needs .* bytes"),
        ("duplicated_tensor", r"is in both model-00001-of-00002.safetensors and model_leftover.safetensors"),
        (
            "shape_off_by_one",
            r"layers\.1\.mlp\.gate\.weight is bf16 of shape \[7, 128\], config.json asks for \[8, 128\]",
        ),
    ],
)
def test_broken_checkpoints_are_refused_with_a_sentence(
    published: Published, out: Path, situation: str, message: str
) -> None:
    with pytest.raises(StokerError, match=message):
        build(BuildOptions(published(situation)), out)
    assert not out.exists()
    assert not out.with_name("built.partial").exists()


def test_an_incomplete_mtp_head_is_refused(copy_of: CopyOf, out: Path) -> None:
    base = copy_of("int4_index_without_mtp")
    situations.rewrite(base / situations.EXTRA, lambda tensors: _drop(tensors, "mtp.norm.weight"))
    with pytest.raises(
        CheckpointError, match=r"mtp\.norm\.weight \(expected shape \[128\]\).*only 40 of its tensors.*--mtp"
    ):
        build(BuildOptions(str(base)), out)


def test_a_tensor_without_a_rule_is_an_error_in_a_base_and_in_a_donor(copy_of: CopyOf, out: Path) -> None:
    base, donor = copy_of("int4_index_without_mtp"), copy_of("bf16")
    for directory, file in ((base, situations.EXTRA), (donor, "model-00002-of-00002.safetensors")):
        situations.rewrite(directory / file, lambda tensors: tensors.update({"surprise.weight": torch.ones(3)}))
        options = BuildOptions(str(base)) if directory is base else BuildOptions(str(donor), mtp=str(donor))
        with pytest.raises(CheckpointError, match=r"surprise\.weight \[3\] in F32 has no place.*no rule explains it"):
            build(options, out)


def test_a_shared_expert_of_the_wrong_shape_or_format_is_refused(
    published: Published, copy_of: CopyOf, out: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"is stored in bf16; --shared-experts takes FP8.*--shared-experts fp8"):
        build(BuildOptions(published("intel_int4"), shared_experts=published("bf16")), out)
    donor = copy_of("qwen_fp8")

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{SHARED}.weight"] = tensors[f"{SHARED}.weight"][:32].clone()

    situations.rewrite(Checkpoint.open(donor).tensors[f"{SHARED}.weight"].file, narrow)
    with pytest.raises(
        CheckpointError, match=r"fp8-b128 of shape \[32, 128\], the base needs \[64, 128\].*another model"
    ):
        build(BuildOptions(published("intel_int4"), shared_experts=str(donor)), out)


def test_a_scale_of_the_wrong_dtype_is_refused(published: Published, copy_of: CopyOf, out: Path) -> None:
    donor, name = copy_of("qwen_fp8"), f"{SHARED}.weight_scale_inv"
    file = Checkpoint.open(donor).tensors[name].file
    situations.rewrite(file, lambda tensors: tensors.update({name: torch.ones(1, 1, dtype=torch.int32)}))
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is I32, expected BF16"):
        build(BuildOptions(published("intel_int4"), shared_experts=str(donor)), out)


def test_a_fused_mtp_head_is_taken_as_it_is(tmp_path: Path, published: Published, out: Path) -> None:
    situations.bf16(tmp_path / "newer", fused_mtp=True)  # as Qwen3.6 publishes it
    build(BuildOptions(published("int4_without_mtp"), mtp=str(tmp_path / "newer")), out)
    assert formats(out)["mtp.layers.0.mlp.experts.gate_up_proj"] == "bf16"
    assert load_model(out).model.mtp is not None


def test_shared_experts_of_another_model_are_told_by_their_values(
    published: Published, tmp_path: Path, out: Path
) -> None:
    situations.qwen_fp8(tmp_path / "sibling", seed=1)
    with pytest.raises(CheckpointError, match=r"differs from .* by 1\d\d% of its norm.*belongs to another model"):
        build(BuildOptions(published("intel_int4"), shared_experts=str(tmp_path / "sibling")), out)


def test_a_directory_called_like_a_format_is_not_guessed_at(
    published: Published, copy_of: CopyOf, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of("qwen_fp8").rename(out.with_name("fp8"))
    monkeypatch.chdir(out.parent)
    with pytest.raises(StokerError, match=r"also a directory of that name here; write \./fp8"):
        build(BuildOptions(published("intel_int4"), shared_experts="fp8"), out)
    build(BuildOptions(published("intel_int4"), shared_experts="./fp8"), out)
    assert torch.equal(tensor(out, f"{SHARED}.weight_scale_inv"), tensor("fp8", f"{SHARED}.weight_scale_inv"))


def test_a_drafter_of_another_model_is_refused(published: Published, tmp_path: Path, out: Path) -> None:
    from tests.support.random_checkpoint import small_drafter_config, write_random_drafter

    write_random_drafter(tmp_path / "d", small_drafter_config(situations.config_of(False), hidden_size=64))
    with pytest.raises(
        CheckpointError, match=r"hidden_size 64 and vocab_size 512, the model 128 .* belongs to another"
    ):
        build(BuildOptions(published("intel_int4"), drafter=str(tmp_path / "d")), out)


def test_what_a_config_cannot_describe_is_refused_before_anything_is_written(published: Published, out: Path) -> None:
    with pytest.raises(CheckpointError, match=r"quantization_config of kind compressed-tensors has no words for that"):
        build(BuildOptions(published("nvfp4_compressed_tensors"), shared_experts=published("qwen_fp8")), out)
    with pytest.raises(CheckpointError, match=r"lm_head would be int8-row, and a quantization_config of kind fp8"):
        build(BuildOptions(published("qwen_fp8"), lm_head="int8"), out)
    assert not out.with_name("built.partial").exists()


@pytest.mark.parametrize("base", ["nvfp4_compressed_tensors", "bf16", "intel_int4"])
def test_an_int8_head_beside_every_describable_base(published: Published, out: Path, base: str) -> None:
    build(BuildOptions(published(base), lm_head="int8"), out)
    assert formats(out)["lm_head"] == "int8-row"
    again = out.with_name("again")
    lines = rules_of(BuildOptions(str(out), lm_head="int8"), again)["--base"]
    assert "2 tensors copied unchanged: already int8-row" in lines
