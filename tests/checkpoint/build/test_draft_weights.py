"""`--draft-weights`: the MTP head and the drafter in INT4, described so that they load, and back again with `--to`."""

import json
import re
from pathlib import Path

import pytest
import torch

from stoker.backends.network.load import load_drafter, load_model
from stoker.checkpoint.build import BuildOptions, build
from stoker.errors import CheckpointError, StokerError
from stoker.weights.formats.int4 import Int4
from tests.checkpoint.build.conftest import CopyOf, Published
from tests.checkpoint.build.result import formats, tensor, weight

EXPERT = "mtp.layers.0.mlp.experts.3.down_proj"


@pytest.mark.parametrize("base", ["bf16", "intel_int4"])
def test_head_and_drafter_are_quantised_and_load(published: Published, out: Path, base: str) -> None:
    quantize = "hybrid-g32" if base == "bf16" else ""
    options = BuildOptions(published(base), drafter=published("drafter"), quantize=quantize, draft_weights="int4-g32")
    build(options, out)
    stored = formats(out)
    assert stored[EXPERT] == stored["mtp.layers.0.self_attn.q_proj"] == "int4-g32"
    assert stored["mtp.layers.0.mlp.shared_expert.up_proj"] == "fp8-b128"
    assert stored["mtp.fc"] == stored["mtp.layers.0.mlp.gate"] == "bf16"
    drafter = formats(out / "drafter")
    assert drafter["fc"] == drafter["layers.0.mlp.down_proj"] == drafter["layers.0.self_attn.k_proj"] == "int4-g32"
    assert drafter["norm"] == drafter["layers.0.self_attn.q_norm"] == "bf16"
    loaded = load_model(out)
    assert loaded.model.mtp is not None
    network = load_drafter(out / "drafter", loaded.config)
    source = tensor(published("drafter"), "fc.weight")
    assert torch.equal(network.fc.weight.dequantize(), Int4.quantize(source, group=32).dequantize())


def test_the_trunk_may_stay_in_16_bit(published: Published, out: Path) -> None:
    build(BuildOptions(published("bf16"), draft_weights="int4-g32"), out)
    stored = formats(out)
    assert stored[EXPERT] == "int4-g32"
    assert {fmt for name, fmt in stored.items() if not name.startswith("mtp.")} <= {"bf16", "fp32"}
    load_model(out)


def test_a_gptq_config_gets_its_rules_too(copy_of: CopyOf, out: Path) -> None:
    """GPTQ says `dynamic` where AutoRound says `extra_config`: "-:" for 16 bit, "+:" for another format."""
    base = copy_of("intel_int4")
    config = json.loads((base / "config.json").read_text())
    auto_round = config["quantization_config"]
    kept = [name for name, entry in auto_round.get("extra_config", {}).items() if entry.get("bits") == 16]
    dynamic: dict[str, dict[str, int]] = {f"-:^{re.escape(name)}$": {} for name in kept}
    same = {key: auto_round[key] for key in ("bits", "group_size", "sym")}
    config["quantization_config"] = {"quant_method": "gptq", "desc_act": False, "dynamic": dynamic, **same}
    (base / "config.json").write_text(json.dumps(config))
    build(BuildOptions(str(base), lm_head="int8", draft_weights="int4-g32"), out)
    assert formats(out)["lm_head"] == "int8-row"
    assert formats(out)[EXPERT] == "int4-g32"
    written = json.loads((out / "config.json").read_text())["quantization_config"]
    assert written["dynamic"]["+:^lm_head$"]["bits"] == 8
    load_model(out)


def test_an_export_dequantises_the_drafter_too(published: Published, tmp_path: Path) -> None:
    small, plain = tmp_path / "small", tmp_path / "plain"
    build(BuildOptions(published("bf16"), drafter=published("drafter"), draft_weights="int4-g32"), small)
    build(BuildOptions(str(small), drafter=str(small / "drafter"), to="fp32"), plain)
    assert set(formats(plain / "drafter").values()) == {"fp32"}
    for name in ("fc", "layers.1.self_attn.o_proj"):
        exported = tensor(plain / "drafter", f"{name}.weight")
        assert torch.equal(exported, weight(small / "drafter", name).dequantize().float())
    assert torch.equal(tensor(plain, f"{EXPERT}.weight"), weight(small, EXPERT).dequantize().float())


def test_a_matrix_that_does_not_divide_is_named_or_kept(published: Published, out: Path) -> None:
    """Experts of width 32 cannot be cut into groups of 128; half a head in INT4 is of no use."""
    with pytest.raises(CheckpointError, match=r"experts\..*cannot be int4-g128: its inputs do not divide"):
        build(BuildOptions(published("bf16"), draft_weights="int4"), out)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_weights": "int3"}, "--draft-weights is 'int3', expected int4 or int4-g64 or int4-g32"),
        ({"draft_weights": "int4", "to": "bf16"}, "so --draft-weights has nothing to do"),
    ],
)
def test_options_that_make_no_sense(published: Published, out: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(StokerError, match=said):
        build(BuildOptions(published("bf16"), **options), out)  # type: ignore[arg-type]


def test_nothing_to_quantise_is_said(published: Published, out: Path) -> None:
    with pytest.raises(CheckpointError, match="no MTP head and no drafter is added, so there is nothing to quantise"):
        build(BuildOptions(published("int4_without_mtp"), draft_weights="int4-g32"), out)
