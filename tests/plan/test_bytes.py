"""Bytes are counted: against published parameter counts, checkpoints on disk, and the engine's own tensors."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.plan import spark
from stoker.backends.family import PAGE_SIZE
from stoker.backends.gpu.kernels.deltanet import DeltaRing
from stoker.checkpoint.inspect.report import inspect
from stoker.demo import EMBEDDED
from stoker.engine.memory import DrafterBytes, UnitBytes
from stoker.plan import memory
from stoker.plan.catalog import GIB, Scheme, find_model, find_scheme, models, schemes
from stoker.plan.formats import BITS, PLAIN, fits, weight_bytes
from stoker.plan.memory import Ask, state_bytes
from stoker.plan.reads import Draft, step_reads
from stoker.plan.shapes import from_file
from stoker.plan.weigh import format_of, weigh, weigh_checkpoint
from stoker.weights.groups import DELTANET, MTP, NORMS, VISION
from stoker.weights.model_config import LINEAR
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
    counted = weigh(from_file(tmp_path / "config.json"), Scheme("x", "", parts, named.mtp, named.not_gates))
    compared = [group for group in on_disk if group not in (VISION, *leave_out)]
    assert {g: counted.groups[g] for g in compared} == {g: on_disk[g] for g in compared}


def test_the_embedded_model_part_by_part() -> None:
    """Its formats applied to its shapes give its files' bytes; from its headers they are taken as they are."""
    model = from_file(EMBEDDED / "config.json")
    report = {group.name: group for group in inspect(EMBEDDED).groups}
    found = weigh_checkpoint(model, EMBEDDED)
    assert found.groups == {name: group.bytes for name, group in report.items()}
    counted = weigh(model, find_scheme("int4+fp8+int8head"))
    for name in ("routed experts", "shared experts", "attention", "head", "router", "embedding", NORMS):
        assert counted.groups[name] == report[name].bytes, name


def test_a_checkpoints_step_is_the_one_inspect_counts() -> None:
    model = from_file(EMBEDDED / "config.json")
    report, weights = inspect(EMBEDDED), weigh_checkpoint(from_file(EMBEDDED / "config.json"), EMBEDDED)
    reads = step_reads(model, weights, Draft("mtp", 1), context=0, users=1, pool=float(model.experts), kv_item=2.0)
    plain = step_reads(model, weights, Draft(), context=0, users=1, pool=float(model.experts), kv_item=2.0)
    assert report.step is not None
    one_row = report.step.items["embedding"]
    assert plain.verify == pytest.approx(report.step.total - one_row, abs=2)
    assert reads.draft == pytest.approx(report.step.draft_bytes, abs=2)


def test_published_sizes() -> None:
    """Checkpoint of document 001 (75.89 GiB with file headers), node of document 004, BF16 as both state it."""
    assert weigh(find_model("122b"), find_scheme("nvfp4")).total / GIB == pytest.approx(75.89, abs=0.03)
    assert weigh(find_model("235b"), find_scheme("gptq-int4")).total / 2 / GIB == pytest.approx(57.64, rel=0.005)
    assert weigh(find_model("122b"), find_scheme("bf16")).total == pytest.approx(250e9, rel=0.001)


def test_the_simulated_spark_reads_the_same_bytes() -> None:
    """benchmarks/plan/spark.py counts the 122B by itself; the two must not drift apart."""
    model, plain = find_model("122b"), weigh(find_model("122b"), find_scheme("int4"))
    reads = step_reads(model, plain, Draft(), context=1000, users=1, pool=256.0, kv_item=2.0)
    drafted = step_reads(model, plain, Draft("mtp", 1), context=1000, users=1, pool=256.0, kv_item=2.0)
    box = spark.Spark(0.0, spark.PLAIN, context=1000)
    assert reads.verify == pytest.approx(box.fixed_bytes + spark.TOP_K * box.expert_bytes, rel=0.003)
    assert drafted.draft == pytest.approx(box.mtp_pass_bytes, rel=0.003)
    dflash = step_reads(model, plain, Draft("dflash", 12), context=1000, users=1, pool=256.0, kv_item=2.0)
    assert dflash.draft == pytest.approx(box.dflash_bytes, rel=0.003)


@pytest.mark.parametrize("depth", [0, 2, 12, 15])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_kv_of_stokers_engine_is_what_it_allocates(depth: int, kv: str) -> None:
    model = find_model("122b")
    assert model.config is not None
    drafter = DrafterBytes.mtp(model.config, torch.float8_e4m3fn if kv == "fp8" else torch.bfloat16)
    unit = UnitBytes.of(model.config, depth, torch.bfloat16, kv_dtype=kv)
    draft = Draft("mtp", depth) if depth else Draft()
    items = {i.name: i.bytes for i in memory._per_sequence(model, Ask(PAGE_SIZE, 1, draft, kv, "stoker"))}
    assert items["KV cache"] == unit.page
    if depth:
        assert items["KV cache: MTP"] == drafter.page


@pytest.mark.parametrize("depth", [0, 2, 12, 15])
def test_state_of_stokers_gpu_engine_is_what_it_allocates(depth: int) -> None:
    """One state whatever the depth, and a ring of what steps feed in, of under 2 MiB a position."""
    model = find_model("122b")
    assert model.delta is not None
    d, layers = model.delta, model.layers_of(LINEAR)
    sizes = (d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.conv_kernel)
    ring = DeltaRing.allocate(1, depth + 1, *sizes, "meta")
    parts = [part.nbytes for part in (ring.recurrent, ring.inputs, ring.gates)]
    assert state_bytes(model, depth, "stoker")[0] == layers * sum(parts)
    assert layers * parts[0] == 144 << 20
    assert layers * sum(parts[1:]) / ring.inputs.shape[1] <= 2 << 20


def test_engines_differ_in_what_a_sequence_keeps() -> None:
    """vLLM a state per draft and one, with a convolution that reaches back over the drafts; llama.cpp one."""
    model = find_model("122b")
    one = (144 << 20) + 36 * 12_288 * 3 * 2
    assert state_bytes(model, 2, "vLLM")[0] == 3 * ((144 << 20) + 36 * 12_288 * (3 + 2) * 2)
    assert state_bytes(model, 0, "vLLM")[0] == state_bytes(model, 2, "llama.cpp")[0] == one


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
    assert weigh(found, find_scheme("bf16")).total >= weigh(found, find_scheme(found.default_weights)).total


def test_vectors_and_odd_shapes_stay_in_16_bit() -> None:
    model = find_model("27b")  # 48 value heads: in_proj_a is no multiple of 32
    kept = {w.name for w in model.weights if format_of(w, find_scheme("int4")) in PLAIN}
    assert "layers.0.linear_attn.in_proj_a.weight" in kept
    assert "layers.0.input_layernorm.weight" in kept
    assert "layers.0.linear_attn.in_proj_qkv.weight" not in kept
