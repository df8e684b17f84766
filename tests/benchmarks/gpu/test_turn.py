"""A turn and a soak from end to end in Triton's interpreter, so that they run on a GPU at the first try."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_a_turn_behind_a_cached_past(interpreter, tmp_path: Path) -> None:
    interpreter(check_turn, tmp_path / "turn.json")


def test_blocks_leave_the_states_of_single_tokens(interpreter, tmp_path: Path) -> None:
    interpreter(check_soak, tmp_path / "soak.json")


def check_turn(path: Path) -> None:
    from benchmarks.gpu.turn import main

    arguments = "--shape tiny --weights int4 --context 70 --new 5 --answer 2 --draft mtp:1 --accept-length 2 --runs 1"
    main([*arguments.split(), "--json", str(path)])
    without, behind = json.loads(path.read_text())["rows"]
    assert [without["context"], behind["context"]] == [0, 70]
    for row in (without, behind):
        assert row["answer_tokens"] == 2
        assert row["seconds"] == row["restore_s"] + row["prefill_s"] + row["decode_s"]
    assert behind["past_bytes_per_step"] > 0
    assert "step_extra_by_bytes_s" in behind


def check_soak(path: Path) -> None:
    from benchmarks.gpu import soak as gpu_soak

    arguments = ["--shape", "tiny", "--weights", "int4", "--steps", "2", "--accept-length", "1.5", "--draft", "mtp:2"]
    gpu_soak.main([*arguments, "--json", str(path)])
    found = json.loads(path.read_text())
    assert found["states_equal"]
    assert found["finite"]
    assert found["tokens"] > found["steps"]
