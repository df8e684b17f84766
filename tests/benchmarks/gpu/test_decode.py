"""The decode benchmark from end to end in Triton's interpreter, so that it runs on a GPU at the first try."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

CONTRACT = {
    "shape", "weights", "batch", "draft", "accept_length", "context", "tokens_per_s", "steps_per_s", "bytes_per_step",
    "copy_bandwidth", "fraction_of_ceiling", "distinct_experts", "acceptance_source",
}  # fmt: skip


@pytest.mark.parametrize("draft", ["mtp:1", "dflash:2"])
def test_decode_with_drafts(interpreter, tmp_path: Path, draft: str) -> None:
    interpreter(check_decode, tmp_path / "result.json", draft)


def test_bytes_of_a_step_are_those_of_the_design(interpreter) -> None:
    interpreter(check_bytes)


def test_assumed_acceptance_has_the_mean_asked_for(interpreter) -> None:
    interpreter(check_acceptance)


def test_kernels_are_told_apart_by_their_order(interpreter) -> None:
    interpreter(check_labels)


def test_a_kernel_adds_what_lies_between_two_ends(interpreter) -> None:
    interpreter(check_shares)


def check_labels() -> None:
    from benchmarks.gpu.decode import labels

    layer = ["linear_kernel", "deltanet_kernel", "linear_kernel", "route_kernel", "gate_up_kernel", "down_kernel"]
    draft = ["mtp_inputs_kernel", "linear_kernel", "begin_kernel", *layer, "linear_kernel", "best_kernel"]
    found = labels(["begin_kernel", *layer, *layer, "linear_kernel", "best_kernel", *draft])
    linears = [label for label in found if label.startswith("linear")]
    trunk = ["linear in", "linear out"] * 2 + ["linear head"]
    assert linears == [*trunk, "linear mtp fc", "linear in", "linear out", "linear head"]


def check_shares() -> None:
    from benchmarks.gpu.decode import shares

    # two steps of two kernels; the second starts before the first ends, and waits inside
    times = [(10.0, 14.0), (11.0, 17.0), (20.0, 25.0), (21.0, 26.0)]
    long, short = shares(["a", "b", "a", "b"], times, 2)
    assert long == {"kernel": "a", "launches": 1.0, "us": 6.0, "us_each": 6.0, "us_inside": 4.5}
    assert short == {"kernel": "b", "launches": 1.0, "us": 2.0, "us_each": 2.0, "us_inside": 5.5}
    assert long["us"] + short["us"] == (26.0 - 10.0) / 2, "together they are the steps, waiting between them included"


def check_decode(path: Path, draft: str) -> None:
    from benchmarks.gpu.decode import main

    # a DeltaNet layer; the drafter has the attention
    arguments = f"--shape tiny --layers 1 --weights int4 --batch 1 --draft {draft} --accept-length 1.5 --context 10"
    main([*arguments.split(), "--steps", "1", "--runs", "1", "--no-check", "--json", str(path)])
    result = json.loads(path.read_text())
    (row,) = result["rows"]
    assert row.keys() >= CONTRACT
    assert result["device"].startswith("CPU, interpreted")
    assert row["acceptance_source"] == "assumed"
    assert 1 <= row["accept_length"] <= 2
    assert row["drafter_runs"]
    assert 2 <= row["distinct_experts"] <= 6


def check_bytes() -> None:
    """Without making the weights: what the formats take, from their shapes."""
    import torch
    from benchmarks.gpu.decode import bytes_per_step, expected_distinct
    from benchmarks.gpu.weights import DFLASH_122B, QWEN_122B, random_drafter, random_model

    with torch.device("meta"):
        weights = random_model(QWEN_122B, "int4", "meta", 16)
        hybrid = random_model(QWEN_122B, "hybrid", "meta", 16)
        drafter = random_drafter(DFLASH_122B, "nvfp4", "meta", 16)
    plain = bytes_per_step(QWEN_122B, weights, 1, "none", 0, 8, 2)
    assert abs(plain / 1e9 - 6.8) < 0.1
    saved = plain - bytes_per_step(QWEN_122B, hybrid, 1, "none", 0, 8, 2)
    assert abs(saved / 1e9 - (0.91 + 1.53) / 2) < 0.02, "half of the shared experts and of the head"
    context = bytes_per_step(QWEN_122B, weights, 1, "none", 1000, 8, 2) - plain
    assert context == 1000 * 24 * 1024, "24 KiB of keys and values a token"
    again = 2 * 6 * 2 * 1024 * 3072  # keys and values are projected by the context's product and by the block's
    assert abs((drafter.nbytes - again) / 1e9 - 1.55) < 0.01, "774 M parameters in 16 bit"
    with_block = bytes_per_step(QWEN_122B, weights, 1, "dflash:12", 0, 8, 2, (DFLASH_122B, drafter))
    assert with_block - plain == drafter.nbytes + weights.head.nbytes
    assert round(expected_distinct(QWEN_122B, 3)) == 23
    assert round(expected_distinct(QWEN_122B, 13)) == 87


def check_acceptance() -> None:
    from benchmarks.gpu.decode import assumed_counts

    for length, rows in ((2.6, 3), (9.3, 13), (1.0, 2)):
        counts = assumed_counts(length, rows, 4)
        assert counts.float().mean().sub(length).abs() < 0.01
        assert 1 <= int(counts.min()) <= int(counts.max()) <= rows
    with pytest.raises(SystemExit, match=r"--accept-length 3.5 is not between 1 and the 3 tokens of a step."):
        assumed_counts(3.5, 3, 1)
