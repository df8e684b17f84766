"""What a step reads is one number, whoever asks: the planner, `stoker inspect`, the simulated Spark."""

import pytest

from benchmarks.plan import spark
from stoker.backends.cpu.drafting import CpuMtp
from stoker.backends.network.count import step_bytes
from stoker.backends.network.load import load_model
from stoker.checkpoint.inspect.report import inspect
from stoker.demo import EMBEDDED
from stoker.plan.catalog import find_model, find_scheme
from stoker.plan.models import from_file
from stoker.sizes.step import Draft, step_reads
from stoker.sizes.weights import WeightBytes
from stoker.weights.names import EMBEDDING, ROUTED


def test_a_checkpoints_step_is_the_one_inspect_counts() -> None:
    model = from_file(EMBEDDED / "config.json")
    report = inspect(EMBEDDED)
    weights = report.weights
    reads = step_reads(model, weights, Draft("mtp", 1), context=0, users=1, pool=float(model.experts), kv_item=2.0)
    plain = step_reads(model, weights, Draft(), context=0, users=1, pool=float(model.experts), kv_item=2.0)
    assert report.step is not None
    one_row = report.step.items["embedding"]
    assert plain.verify == pytest.approx(report.step.total - one_row, abs=2)
    assert reads.draft == pytest.approx(report.step.draft_bytes, abs=2)


def test_the_depth_controller_is_told_the_same() -> None:
    """Of the embedded model as it is loaded, packed for the CPU: the bytes of its files."""
    model, found = load_model(EMBEDDED).model, inspect(EMBEDDED)
    step, moe = step_bytes(model), model.config.moe
    assert moe is not None
    assert found.step is not None
    assert (step.experts, step.top_k) == (moe.num_experts, moe.top_k)
    assert step.fixed == sum(found.weights.fixed.values())
    assert step.expert * moe.num_experts == found.weights.groups[ROUTED]
    states = sum(size for name, size in found.step.items.items() if "state" in name)
    row = found.step.items[EMBEDDING]
    assert step.fixed + moe.top_k * step.expert == found.step.total - states - row
    assert CpuMtp(model, 1, 1).cost.token == found.step.draft_bytes


def test_the_simulated_spark_reads_the_same_bytes() -> None:
    """benchmarks/plan/spark.py counts the 122B by itself; the two must not drift apart."""
    model, plain = find_model("122b"), WeightBytes.of(find_model("122b"), find_scheme("int4"))
    reads = step_reads(model, plain, Draft(), context=1000, users=1, pool=256.0, kv_item=2.0)
    drafted = step_reads(model, plain, Draft("mtp", 1), context=1000, users=1, pool=256.0, kv_item=2.0)
    box = spark.Spark(0.0, spark.PLAIN, context=1000)
    assert reads.verify == pytest.approx(box.fixed_bytes + spark.TOP_K * box.expert_bytes, rel=0.003)
    assert drafted.draft == pytest.approx(box.mtp_pass_bytes, rel=0.003)
    dflash = step_reads(model, plain, Draft("dflash", 12), context=1000, users=1, pool=256.0, kv_item=2.0)
    assert dflash.draft == pytest.approx(box.dflash_bytes, rel=0.003)
