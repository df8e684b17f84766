"""The prefill benchmark from end to end in Triton's interpreter, so that it runs on a GPU at the first try."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_prefill_in_chunks(interpreter, tmp_path: Path) -> None:
    interpreter(check_prefill, tmp_path / "result.json")


def test_operations_are_those_of_the_shapes(interpreter) -> None:
    interpreter(check_operations)


def check_prefill(path: Path) -> None:
    from benchmarks.gpu.prefill import main

    # a DeltaNet layer; test_prefill.py has the attention
    arguments = "--shape tiny --layers 1 --weights hybrid --tokens 66 --context 10 --chunk 64 --runs 1 --check-tokens 3"
    main([*arguments.split(), "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["device"].startswith("CPU, interpreted")
    check = result["checks"]["hybrid"]
    assert check["cut_equals_whole"]
    # rounding towards zero; one layer too many or too few is ten times as far off
    assert 0 < check["logits_differ_from_steps"] < 0.05
    assert 0 < check["states_differ_from_steps"] < 0.05
    (row,) = result["rows"]
    assert (row["tokens"], row["context"], row["chunk"]) == (66, 10, 64)
    assert row["seconds"] > 0
    assert row["expert_rows_computed_per_pair"] > 1
    assert row["buffer_bytes"] > 0


def check_operations() -> None:
    """By hand for Qwen3.5-122B-A10B: 2 x 10.2e9 weights a token less embedding and head, and attention's squares."""
    from benchmarks.gpu.prefill import operations
    from benchmarks.gpu.weights import QWEN_122B

    found = operations(QWEN_122B, 4096, 0)
    delta, full = 3072 * (20608 + 8192), 3072 * (17408 + 8192)
    assert found["projections"] == 2 * 4096 * (36 * delta + 12 * full)
    assert found["routed experts"] == 2 * 4096 * 48 * 8 * 3 * 1024 * 3072
    assert found["attention"] == 4 * 12 * 32 * 256 * 4096 * 4097 / 2
    assert 60e12 < sum(found.values()) < 80e12
    behind = operations(QWEN_122B, 512, 32768)
    assert behind["attention"] == 4 * 12 * 32 * 256 * (512 * 32768 + 512 * 513 / 2)
