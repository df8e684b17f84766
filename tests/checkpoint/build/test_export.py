"""`--to`: dequantised checkpoints that transformers loads, equal to `dequantize()` in every value."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.backends.network.load import load_model
from stoker.checkpoint.build import BuildOptions, build
from stoker.errors import StokerError
from stoker.weights.checkpoint import Checkpoint
from tests.checkpoint.build.conftest import Published
from tests.checkpoint.build.result import formats, tensor, weight

TRUNK = "model.language_model."


@pytest.fixture(scope="module")
def hybrid(published: Published, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid") / "built"
    base, fp8, bf16 = published("intel_int4"), published("qwen_fp8"), published("bf16")
    build(BuildOptions(base, shared_experts=fp8, lm_head="int8", mtp=bf16), out)
    return out


@pytest.mark.parametrize(("to", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_hybrid_loads_in_transformers_with_equal_tensors(
    hybrid: Path, out: Path, to: str, dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    build(BuildOptions(str(hybrid), to=to), out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}  # mtp.* is ignored by design
    assert model.dtype == dtype
    state, stored = model.state_dict(), Checkpoint.open(hybrid)
    layer = "layers.1.mlp"
    for name, module in (
        ("lm_head.weight", "lm_head"),
        (f"model.{layer}.shared_expert.up_proj.weight", f"{TRUNK}{layer}.shared_expert.up_proj"),
        ("model.layers.3.self_attn.q_proj.weight", f"{TRUNK}layers.3.self_attn.q_proj"),
        ("model.layers.0.linear_attn.in_proj_a.weight", f"{TRUNK}layers.0.linear_attn.in_proj_a"),
    ):
        assert torch.equal(state[name], weight(stored, module).dequantize(dtype)), name
    fused = state[f"model.{layer}.experts.gate_up_proj"]  # [E, 2I, H]
    for expert in range(8):
        single = f"{TRUNK}{layer}.experts.{expert}"
        rows = [weight(stored, f"{single}.{part}").dequantize(dtype) for part in ("gate_proj", "up_proj")]
        assert torch.equal(fused[expert], torch.cat(rows)), single


def test_every_value_of_an_export_is_that_of_dequantize(hybrid: Path, out: Path) -> None:
    build(BuildOptions(str(hybrid), to="fp32"), out)
    stored, exported = Checkpoint.open(hybrid), Checkpoint.open(out)
    assert set(formats(out).values()) == {"fp32"}
    for module in stored.formats.layers:
        if ".mlp.experts." in module and not module.startswith("mtp."):
            stem, expert, part = module.rsplit(".", 2)
            values = tensor(exported, f"{stem}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}")[int(expert)]
            half = len(values) // 2
            got = {"down_proj": values, "gate_proj": values[:half], "up_proj": values[half:]}[part]
        else:
            name = f"{module}.weight" if f"{module}.weight" in exported.tensors else module
            got = tensor(exported, name)
        assert torch.equal(got, weight(stored, module).dequantize()), module
    assert "mtp.layers.0.mlp.experts.7.gate_proj.weight" in exported.tensors


@pytest.mark.parametrize("base", ["nvfp4_modelopt", "nvfp4_compressed_tensors", "qwen_fp8", "intel_int4"])
def test_every_published_format_is_exported(published: Published, out: Path, base: str) -> None:
    build(BuildOptions(published(base), to="bf16"), out)
    assert set(formats(out).values()) <= {"bf16", "fp32"}
    module = f"{TRUNK}layers.2.mlp.experts.4.down_proj"
    expected = weight(published(base), module).dequantize(torch.bfloat16)
    assert torch.equal(tensor(out, f"{TRUNK}layers.2.mlp.experts.down_proj")[4], expected)
    load_model(out)


def test_fp32_tensors_of_the_published_bf16_layout_stay_fp32(published: Published, out: Path) -> None:
    build(BuildOptions(published("qwen_fp8"), to="bf16"), out)
    stored = formats(out)
    assert stored[f"{TRUNK}layers.0.linear_attn.A_log"] == stored[f"{TRUNK}layers.0.linear_attn.norm"] == "fp32"
    assert stored[f"{TRUNK}layers.0.linear_attn.dt_bias"] == "bf16"


def test_small_blocks_give_the_same_values_as_whole_layers(hybrid: Path) -> None:
    """Row blocks are how memory is bounded; a block boundary inside a layer must not be seen in the result."""
    from stoker.checkpoint.build.convert import dequantized
    from stoker.checkpoint.build.units import whole

    checkpoint = Checkpoint.open(hybrid)
    for module in ("lm_head", f"{TRUNK}layers.3.self_attn.q_proj", f"{TRUNK}layers.0.mlp.shared_expert.down_proj"):
        layer = checkpoint.formats.layers[module]
        infos = {suffix: checkpoint.tensors[name] for suffix, name in layer.tensors.items()}
        blocks: list[Tensor] = list(dequantized(whole(layer, infos)[0], 1))
        assert len(blocks) == -(-layer.shape[0] // 128)
        assert torch.equal(torch.cat(blocks), weight(hybrid, module).dequantize())


def test_a_qwen3_moe_keeps_its_experts_one_by_one(checkpoints: dict[str, Path], out: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = checkpoints["qwen3_moe"]  # fused here, which no release is
    build(BuildOptions(str(base), to="fp32"), out)
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in Checkpoint.open(out).tensors
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert {key: names for key, names in info.items() if names} == {}
    fused = tensor(base, "model.layers.0.mlp.experts.gate_up_proj").float()
    assert torch.equal(model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"], fused)


@pytest.mark.parametrize(
    "options", [{"quantize": "int4"}, {"lm_head": "int8"}, {"shared_experts": "fp8"}], ids=lambda o: next(iter(o))
)
def test_an_export_does_not_quantise(published: Published, out: Path, options: dict[str, str]) -> None:
    with pytest.raises(StokerError, match=r"--to bf16 turns every weight back into bf16, so --.* has nothing to do"):
        build(replace(BuildOptions(published("bf16"), to="bf16"), **options), out)  # type: ignore[arg-type]
