"""`--quantize` from BF16: which layers, which formats, the same bits as quantising the whole layer at once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.backends.network.load import load_model
from stoker.checkpoint.build import BuildOptions, build
from stoker.errors import CheckpointError, StokerError
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int4 import Int4
from tests.checkpoint.build.conftest import Published
from tests.checkpoint.build.result import bytes_of, formats, tensor, weight
from tests.support import situations

LAYER = "model.language_model.layers.0"


def test_hybrid_is_int4_with_fp8_shared_experts_and_an_int8_head(published: Published, out: Path) -> None:
    build(BuildOptions(published("bf16"), quantize="hybrid-g32"), out)
    stored = formats(out)
    expected = {
        "int4-g32": [
            "mlp.experts.0.gate_proj",
            "mlp.experts.7.down_proj",
            "linear_attn.in_proj_qkv",
            "linear_attn.out_proj",
        ],
        "fp8-b128": ["mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj"],
        "bf16": ["linear_attn.in_proj_a", "mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d"],
    }
    for fmt, modules in expected.items():
        assert {stored[f"{LAYER}.{module}"] for module in modules} == {fmt}
    assert stored["model.language_model.layers.3.self_attn.q_proj"] == "int4-g32"
    assert stored["lm_head"] == "int8-row"
    assert stored["mtp.fc"] == stored["model.language_model.embed_tokens"] == "bf16"
    assert stored["mtp.layers.0.mlp.experts.0.gate_proj"] == "bf16"
    load_model(out)


def test_fused_experts_are_cut_and_quantised_as_their_formats_do(published: Published, out: Path) -> None:
    base = published("bf16")
    build(BuildOptions(base, quantize="hybrid-g32"), out)
    fused = tensor(base, f"{LAYER}.mlp.experts.gate_up_proj")  # [E, 2I, H], gate rows first
    half = fused.shape[1] // 2
    for part, rows in (("gate_proj", fused[5, :half]), ("up_proj", fused[5, half:])):
        expected = Int4.quantize(rows, group=32).tensors()
        got = weight(out, f"{LAYER}.mlp.experts.5.{part}").tensors()
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[suffix], expected[suffix]) for suffix in got)
    shared = f"{LAYER}.mlp.shared_expert.up_proj"
    expected_fp8 = Fp8Block.quantize(tensor(base, f"{shared}.weight"))
    assert torch.equal(weight(out, shared).dequantize(), expected_fp8.dequantize())


def test_memory_is_no_part_of_the_result(published: Published, tmp_path: Path) -> None:
    """Blocks of rows, not the whole layer: the head of 512 rows in four blocks gives the bytes of one."""
    from stoker.checkpoint.build.convert import pieces
    from stoker.checkpoint.build.units import Convert, outputs_of, whole
    from stoker.weights.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(Path(published("bf16")))
    layer = checkpoint.formats.layers["lm_head"]
    rows = whole(layer, {"weight": checkpoint.tensors["lm_head.weight"]})
    for fmt in ("int8-row", "fp8-b128", "int4-g64"):
        unit = Convert(rows, fmt, outputs_of("lm_head.weight", layer.shape, fmt))
        at_once, in_blocks = (
            [(name, values.contiguous().view(torch.uint8).flatten()) for name, values in pieces(unit, block)]
            for block in (1 << 30, 1)
        )
        for out in unit.outputs:
            one, many = (
                torch.cat([values for name, values in found if name == out.name]) for found in (at_once, in_blocks)
            )
            assert torch.equal(one, many), out.name


def test_int4_alone_leaves_shared_experts_and_head_in_16_bit(published: Published, out: Path) -> None:
    build(BuildOptions(published("bf16"), quantize="int4-g32"), out)
    stored = formats(out)
    assert stored[f"{LAYER}.mlp.shared_expert.up_proj"] == stored["lm_head"] == "bf16"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "auto-round"
    assert config["group_size"] == 32
    assert config["block_name_to_quantize"] == "model.language_model.layers"


def test_options_for_one_group_add_up_to_hybrid(published: Published, tmp_path: Path) -> None:
    base = published("bf16")
    build(BuildOptions(base, quantize="hybrid-g32"), tmp_path / "a")
    build(BuildOptions(base, quantize="int4-g32", shared_experts="fp8", lm_head="int8"), tmp_path / "b")
    one, other = bytes_of(tmp_path / "a"), bytes_of(tmp_path / "b")
    assert {k: v for k, v in one.items() if k != "stoker.json"} == {
        k: v for k, v in other.items() if k != "stoker.json"
    }


def test_fp8_is_described_as_qwen_describes_it(published: Published, out: Path) -> None:
    build(BuildOptions(published("bf16"), quantize="fp8"), out)
    assert formats(out)[f"{LAYER}.mlp.experts.2.down_proj"] == "fp8-b128"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert "lm_head" in config["modules_to_not_convert"]


def test_shared_experts_and_head_of_a_bf16_base_alone(published: Published, out: Path) -> None:
    build(BuildOptions(published("bf16"), shared_experts="fp8", lm_head="int8"), out)
    stored = formats(out)
    assert stored[f"{LAYER}.mlp.shared_expert.up_proj"] == "fp8-b128"
    assert stored[f"{LAYER}.mlp.experts.gate_up_proj"] == "bf16"  # still fused
    load_model(out)


def test_a_quantised_base_is_not_quantised_again(published: Published, out: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is stored in int4-g32, and --quantize hybrid starts from 16-bit"):
        build(BuildOptions(published("intel_int4"), quantize="hybrid"), out)


def test_experts_that_do_not_divide_into_groups_are_refused(published: Published, out: Path) -> None:
    with pytest.raises(CheckpointError, match=r"down_proj.weight \[128, 64\] cannot be int4-g128: its inputs do not"):
        build(BuildOptions(published("bf16"), quantize="int4"), out)


def test_a_projection_that_does_not_fit_stays_in_16_bit_under_a_rule(tmp_path: Path, out: Path) -> None:
    from tests.support.random_checkpoint import write_random_checkpoint

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    config = situations.config_of(False, head_dim=36, rope_parameters=rope)  # o_proj reads 4 * 36 inputs
    write_random_checkpoint(tmp_path / "base", config)
    lines = build(BuildOptions(str(tmp_path / "base"), quantize="int4-g32"), out).rules["--base"]
    assert "1 tensor kept in 16 bit: not int4-g32, its inputs do not divide into groups of 32" in lines
    assert formats(out)["model.layers.3.self_attn.o_proj"] == "bf16"


def test_a_tied_head_cannot_be_quantised(tmp_path: Path, out: Path) -> None:
    from tests.support.random_checkpoint import write_random_checkpoint

    write_random_checkpoint(tmp_path / "base", situations.config_of(False, tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"ties the head to the embedding .* leave --lm-head out"):
        build(BuildOptions(str(tmp_path / "base"), lm_head="int8"), out)
    build(BuildOptions(str(tmp_path / "base"), quantize="hybrid-g32"), out)
    assert "lm_head" not in formats(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int5"}, r"--quantize is 'int5', expected int4 or int4-g64"),
        ({"lm_head": "int4"}, r"--lm-head is 'int4', expected int8"),
        ({"to": "fp16"}, r"--to is 'fp16', expected bf16 or fp32"),
        ({"base": "hf:a/b"}, r"--base takes a directory.*hf download a/b"),
    ],
)
def test_options_are_checked_before_files(out: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(StokerError, match=message):
        build(replace(BuildOptions("/nowhere"), **options), out)  # type: ignore[arg-type]
