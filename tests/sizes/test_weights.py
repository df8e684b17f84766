"""Bytes of weights are those of published parameter counts, of checkpoints on disk and of loaded weights."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stoker.checkpoint.inspect.report import inspect
from stoker.demo import EMBEDDED
from stoker.plan.catalog import GIB, find_model, find_scheme, models, schemes
from stoker.plan.models import from_file
from stoker.sizes.weights import BITS, PLAIN, Scheme, WeightBytes, fits, weight_bytes
from stoker.weights.names import DELTANET, MTP, NORMS, VISION
from tests.support import situations


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3.5-122B-A10B", 122_111_526_912),
        ("Qwen3.5-397B-A17B", 396_346_350_336),
        ("Qwen3.6-27B", 26_895_998_464),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-235B-A22B", 235_093_634_560),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_parameters_are_those_of_the_published_networks(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


def test_the_122b_by_hand() -> None:
    """The arithmetic of the fact sheet, part by part."""
    model = find_model("122b")
    assert sum(w.parameters for w in model.weights if w.group == MTP) == 2_523_679_232
    assert model.parameters + model.vision_parameters == 122_562_817_776
    assert model.kv_bytes_per_token(2.0) == 24_576
    assert model.mtp_kv_bytes(1, 2.0) == 2_048
    assert model.recurrent_bytes == 144 << 20
    assert model.conv_bytes() == 36 * 73_728
    assert model.drafter is not None
    assert model.drafter.parameters == pytest.approx(774e6, rel=0.001)


@pytest.mark.parametrize(
    ("write", "scheme", "leave_out"),
    [
        (situations.bf16, "bf16", ()),
        (situations.qwen_fp8, "fp8", ()),
        # here in_proj_a and _b, of 8 outputs, are INT4 too; AutoRound leaves what is no multiple of 32 in 16 bit
        (situations.intel_int4, "int4-g32", (DELTANET,)),
    ],
)
def test_a_scheme_weighs_what_a_checkpoint_of_it_weighs_on_disk(
    write: Callable[[Path], None], scheme: str, leave_out: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path)
    on_disk = {group.name: group.bytes for group in inspect(tmp_path).groups}
    named = schemes()["int4"] if scheme == "int4-g32" else schemes()[scheme]
    parts = {k: v.replace("int4-g128", "int4-g32") for k, v in named.parts.items()}
    counted = WeightBytes.of(from_file(tmp_path / "config.json"), Scheme("x", "", parts, named.mtp, named.not_gates))
    compared = [group for group in on_disk if group not in (VISION, *leave_out)]
    assert {g: counted.groups[g] for g in compared} == {g: on_disk[g] for g in compared}


def test_the_embedded_model_part_by_part() -> None:
    """Its formats applied to its shapes give its files' bytes; from its headers they are taken as they are."""
    model = from_file(EMBEDDED / "config.json")
    report = {group.name: group for group in inspect(EMBEDDED).groups}
    found = inspect(EMBEDDED).weights
    assert found.groups == {name: group.bytes for name, group in report.items()}
    counted = WeightBytes.of(model, find_scheme("int4+fp8+int8head"))
    for name in ("routed experts", "shared experts", "attention", "head", "router", "embedding", NORMS):
        assert counted.groups[name] == report[name].bytes, name


def test_published_sizes() -> None:
    """Checkpoint of document 001 (75.89 GiB with file headers), node of document 004, BF16 as both state it."""
    assert WeightBytes.of(find_model("122b"), find_scheme("nvfp4")).total / GIB == pytest.approx(75.89, abs=0.03)
    assert WeightBytes.of(find_model("235b"), find_scheme("gptq-int4")).total / 2 / GIB == pytest.approx(
        57.64, rel=0.005
    )
    assert WeightBytes.of(find_model("122b"), find_scheme("bf16")).total == pytest.approx(250e9, rel=0.001)


@pytest.mark.parametrize("model", [m.name for m in models()])
def test_fewer_bits_are_never_more_bytes(model: str) -> None:
    found = find_model(model)
    for weight in found.weights:
        sizes: dict[int, list[int]] = {}
        for name, bits in BITS.items():
            if fits(name, weight.shape):
                sizes.setdefault(bits, []).append(weight_bytes(name, weight.shape))
        ordered = [sizes[bits] for bits in sorted(sizes)]
        for fewer, more in pairwise(ordered):
            assert max(fewer) <= min(more), weight.name
    assert (
        WeightBytes.of(found, find_scheme("bf16")).total
        >= WeightBytes.of(found, find_scheme(found.default_weights)).total
    )


def test_vectors_and_odd_shapes_stay_in_16_bit() -> None:
    model = find_model("27b")  # 48 value heads: in_proj_a is no multiple of 32
    kept = {w.name for w in model.weights if find_scheme("int4").format_of(w) in PLAIN}
    assert "layers.0.linear_attn.in_proj_a.weight" in kept
    assert "layers.0.input_layernorm.weight" in kept
    assert "layers.0.linear_attn.in_proj_qkv.weight" not in kept


@pytest.mark.parametrize("rows", [256, 256 + 16])
@pytest.mark.parametrize("kind", ["bf16", "int4-g128", "fp8-b128", "int8-row", "nvfp4"])
def test_packing_for_the_gpu_adds_named_bytes_only(kind: str, rows: int) -> None:
    """What the kernels read of a matrix: as stored, with rows padded to 32 and scales as the kernels want them."""
    pytest.importorskip("triton")
    from stoker.backends.gpu import packed

    columns = 384
    codes, groups = torch.zeros(rows, columns // 2, dtype=torch.uint8), columns // 128
    found = {
        "bf16": lambda: packed.pack_bf16(torch.zeros(rows, columns).bfloat16()),
        "int4-g128": lambda: packed.pack_int4(
            torch.zeros(columns // 8, rows, dtype=torch.int32), torch.ones(groups, rows).half()
        ),
        "fp8-b128": lambda: packed.pack_fp8(
            torch.zeros(rows, columns).to(torch.float8_e4m3fn), torch.ones(-(-rows // 128), groups)
        ),
        "int8-row": lambda: packed.pack_int8(torch.zeros(rows, columns, dtype=torch.int8), torch.ones(rows)),
        "nvfp4": lambda: packed.pack_nvfp4(
            codes, torch.ones(rows, columns // 16).to(torch.float8_e4m3fn), torch.ones(rows)
        ),
    }[kind]().nbytes
    padded = -(-rows // 32) * 32
    scales = {
        "int4-g128": -groups * padded // 2,  # no zero points: all are 8
        "fp8-b128": 4 * groups * padded // 16 - 2 * groups * -(-padded // 128),  # fp32 per 16 rows, not bf16 per 128
        "nvfp4": padded * columns // 16 + 4 * padded - 8,  # each scale twice, the weight's own once per row
    }
    assert found == weight_bytes(kind, (padded, columns)) + scales.get(kind, 0)
