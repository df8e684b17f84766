"""The box report: it runs where there is no GPU and no rich, loses no row, takes no more memory than there is, and its
text names neither owner nor folders."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.gpu import box_text

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
SHAPE = "qwen3.5-122b-a10b"


# With a faster interpreter, once the report has chosen to be interpreted.
FASTER = """
import sys
from benchmarks.gpu import box_report
from tests.backends.gpu.kernels import patches
usable = box_report._usable
box_report._usable = lambda dry: (patches.install(), usable(dry))
sys.exit(box_report.main())
"""


def run(*arguments: str, first: Path | None = None, dry: bool = False) -> subprocess.CompletedProcess[str]:
    """As the Makefile does; `first` is a folder whose modules come before all others."""
    path = os.pathsep.join(map(str, [*([first] if first else []), ROOT / "src", ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TRITON_INTERPRET", None)
    program = ["-c", FASTER, "--dry-run"] if dry else ["-m", "benchmarks.gpu.box_report"]
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def test_dry_run_on_a_python_without_rich(tmp_path: Path) -> None:
    for module in ("rich", "typer", "aiohttp", "transformers", "fastapi"):  # what a plain torch environment lacks
        (tmp_path / f"{module}.py").write_text("raise ImportError('not installed')\n")
    done = run("--out", str(tmp_path / "out"), first=tmp_path, dry=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "box-report.json").read_text())
    assert [(row["weights"], row["draft"]) for row in report["rows"]] == [("hybrid", "none"), ("int4", "mtp:1")]
    for row in report["rows"]:
        assert row["whole"]["source"] == "measured"
        assert row["whole"]["steps_per_s"] == pytest.approx(row["steps_per_s"])
        assert row["whole"]["fraction_of_ceiling"] == pytest.approx(row["fraction_of_ceiling"])
    posted = (tmp_path / "out" / "box-report.md").read_text()
    assert done.stdout.endswith(posted + "\n")
    assert re.search(r"\| int4 \| 1 \| mtp:1, [12]\.\d\d per step assumed \|", posted)
    for private in (os.uname().nodename, str(tmp_path), str(ROOT), str(Path.home())):
        assert private not in posted
        assert private not in json.dumps(report)


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "finds no GPU here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_rows_survive_a_failing_one(interpreter, tmp_path: Path) -> None:
    interpreter(check_failing_row, tmp_path)


def test_rows_survive_ctrl_c_and_are_not_measured_again(interpreter, tmp_path: Path) -> None:
    interpreter(check_stopped, tmp_path)


def test_a_lost_gpu_starts_the_process_again(interpreter, tmp_path: Path) -> None:
    interpreter(check_lost, tmp_path)


def test_memory_is_counted_as_it_is_allocated(interpreter) -> None:
    interpreter(check_memory)


def test_layers_are_those_that_fit(interpreter) -> None:
    interpreter(check_layers)


def test_all_layers_follow_from_some(interpreter) -> None:
    interpreter(check_extrapolation)


def test_planner_predicts_from_the_bandwidth_of_the_box(interpreter) -> None:
    interpreter(check_prediction)


def _report(folder: Path, *arguments: str, measured: Any = None) -> tuple[int, dict[str, Any], list[str]]:
    """A dry run in which nothing is computed: status, report and rows asked for."""
    from benchmarks.gpu import box_report, box_rows

    asked: list[str] = []

    def measure(self: Any, case: box_rows.Case, network: Any, delivered: dict[str, float]) -> dict[str, Any]:
        asked.append(str(case))
        if measured:
            measured(case)
        return _row(case)

    with (
        patch.object(box_rows.Measuring, "measure", measure),
        patch.object(box_rows.Measuring, "network"),
        patch.object(box_rows.Measuring, "needed_bytes", return_value=1),
    ):
        status = box_report.main(["--dry-run", "--out", str(folder), *arguments])
    return status, json.loads((folder / "box-report.json").read_text()), asked


def _row(case: Any, **changes: Any) -> dict[str, Any]:
    row = {**case.key, "accept_length": case.accept_length or 1.0, "counts": True, "distinct_experts": 8.0,
           "distinct_expected": 8.0, "acceptance_source": "assumed" if case.accept_length else "no drafts",
           "layers": 48, "steps_per_s": 25.0, "bytes_per_step": 5e9}  # fmt: skip
    whole = {"source": "measured", "tokens_per_s": 36.1, "steps_per_s": 25.0, "ceiling_steps_per_s": 40.0}
    return row | {"whole": {**whole, "fraction_of_ceiling": 0.625}} | changes


def check_failing_row(folder: Path) -> None:
    def fail(case: Any) -> None:
        if case.weights == "hybrid":
            raise MemoryError(f"no room in {Path.home()}/secret/kernels/cache.py\nand more")

    status, report, _ = _report(folder, measured=fail)
    assert status == 1
    first, second = report["rows"]
    assert first["error"] == "MemoryError: no room in ~cache.py"
    assert first["trace"][-1].startswith("test_box_report.py:")
    assert second["whole"]["tokens_per_s"] == 36.1
    posted = (folder / "box-report.md").read_text()
    assert "| hybrid | 1 | none | 8 | failed |" in posted
    assert "- FAILED: hybrid, batch 1, none: MemoryError" in posted
    assert "| 36.1 | 25.0 | 40.0 | 62% |" in posted


def check_stopped(folder: Path) -> None:
    def stop(case: Any) -> None:
        if case.weights == "int4":
            raise KeyboardInterrupt

    status, report, _ = _report(folder, measured=stop)
    assert status == 130
    assert [row["weights"] for row in report["rows"]] == ["hybrid"]
    assert "STOPPED EARLY: 1 of 2 rows" in (folder / "box-report.md").read_text()
    status, report, asked = _report(folder, "--resume")
    assert status == 0
    assert asked == ["int4, batch 1, drafts mtp:1, context 8"]
    assert [row["weights"] for row in report["rows"]] == ["hybrid", "int4"]
    content = json.loads((folder / "box-report.json").read_text())
    (folder / "box-report.json").write_text(json.dumps(content | {"steps": 7}))
    status, _, asked = _report(folder, "--resume")
    assert (status, asked) == (2, []), "rows of other lengths are not mixed"


def check_lost(folder: Path) -> None:
    from benchmarks.gpu import box_report

    def lost(self: Any) -> None:
        if len(self.content["rows"]) == 1:
            raise box_report.GpuLost

    with (
        patch.object(box_report.Report, "_still_there", lost),
        patch.object(os, "execv", side_effect=SystemExit) as begun,
    ):
        with pytest.raises(SystemExit):
            _report(folder)
        program, command = begun.call_args.args
    assert program == sys.executable
    assert command[1:] == ["-m", "benchmarks.gpu.box_report", "--dry-run", "--out", str(folder), "--resume"]
    _, report, asked = _report(folder, "--resume")
    assert len(asked) == 1
    assert len(report["rows"]) == 2


def check_memory() -> None:
    import torch
    from benchmarks.gpu.box_rows import MAKING, RUNTIME, Case, Measuring, storage_bytes

    rows = [Case("int4", 2, "mtp:1", 1.5, 300), Case("int4", 1, "dflash:2", 1.5, 300)]
    measuring = Measuring("tiny", rows, 1, 1)
    real = measuring.network("int4", 2, "cpu")
    decodes = [storage_bytes((real, measuring._decode(row, real))) for row in rows]
    making = storage_bytes(real) + MAKING * 256 * 128
    assert measuring.needed_bytes(2) == max(making, *decodes) + RUNTIME
    assert storage_bytes((real, real.first(1))) == storage_bytes(real), "fewer layers are no second copy"
    shared = torch.zeros(6, 4)
    assert storage_bytes((shared, [shared[:2]], {"flat": shared.view(-1)}, torch.ones(3))) == 6 * 4 * 4 + 3 * 4


def check_layers() -> None:
    from benchmarks.gpu.box_report import choose_layers
    from benchmarks.gpu.box_rows import Case, Measuring

    from stoker.errors import RequestError

    gib = 1 << 30
    measuring = Measuring(SHAPE, [Case("int4", 1, "none", None, 128)], 64, 3)
    assert 66 < measuring.needed_bytes(48) / gib < 70, "INT4 of the whole model is 63 GiB, 4 more while it is made"
    # from here on a layer takes one
    with patch.object(Measuring, "needed_bytes", lambda self, layers: layers * gib):
        assert choose_layers(measuring, None, 100 * gib, "") == 48
        assert choose_layers(measuring, None, 31 * gib, "") == 28, "whole patterns of four"
        assert choose_layers(measuring, 12, 31 * gib, "") == 12
        with pytest.raises(RequestError, match=r"32 layers of .* need 32.0 GiB and 31.0 may be taken .*leave --layers"):
            choose_layers(measuring, 32, 31 * gib, "")
        with pytest.raises(RequestError, match=r"8 layers .* 7.0 may be taken .*or measure --shape qwen3.5-35b-a3b"):
            choose_layers(measuring, None, 7 * gib, "")
        with pytest.raises(RequestError, match="--layers 10 cannot be measured"):
            choose_layers(measuring, 10, 31 * gib, "")


def check_extrapolation() -> None:
    from benchmarks.gpu.box_rows import half, whole
    from benchmarks.gpu.decode import drafter_for, shortened
    from benchmarks.gpu.weights import QWEN_122B

    def measured(layers: int) -> dict[str, Any]:
        seconds, size = 3e-3 + layers * 0.5e-3, 1.5e9 + layers * 1e8
        return {
            "layers": layers,
            "steps_per_s": 1 / seconds,
            "bytes_per_step": size,
            "batch": 4,
            "accept_length": 2.6,
        }

    found = whole([measured(28), measured(half(QWEN_122B, 28))], 48, 227e9)
    assert found["source"] == "extrapolated from 28 and 12 layers"
    assert found["steps_per_s"] == pytest.approx(1 / 27e-3)
    assert found["tokens_per_s"] == pytest.approx(4 * 2.6 / 27e-3)
    assert found["bytes_per_step"] == pytest.approx(6.3e9)
    assert found["fraction_of_ceiling"] == pytest.approx(6.3e9 / 227e9 / 27e-3)
    assert whole([measured(48)], 48, 227e9)["source"] == "measured"
    with pytest.raises(RuntimeError, match="28 layers took no longer than 12"):
        whole([measured(28), measured(12) | {"steps_per_s": 1.0}], 48, 227e9)
    for layers in (8, 28, 48):
        taps = drafter_for(SHAPE, shortened(QWEN_122B, layers)).taps
        assert len(set(taps)) == 8, "the drafter reads as much whatever the trunk is cut to"
        assert max(taps) < layers


def check_prediction() -> None:
    from benchmarks.gpu.box_rows import Measuring, cases, predicted
    from benchmarks.gpu.decode import bytes_per_step, expected_distinct
    from benchmarks.gpu.weights import DFLASH_122B

    rows = cases()
    assert len(rows) == len({str(row) for row in rows}) == 11
    plain = next(row for row in rows if row.weights == "int4")
    spark = predicted(plain, SHAPE, 227e9, "NVIDIA GB10", True)
    assert spark is not None
    assert spark["low"] < 28.2 < spark["high"], "published for vLLM on a Spark"
    faster = predicted(plain, SHAPE, 454e9, "NVIDIA GB10", True)
    assert faster is not None
    assert 1.5 < faster["steps_per_s"] / spark["steps_per_s"] < 2.0
    assert predicted(plain, "tiny", 227e9, "", True) is None
    network = Measuring(SHAPE, rows, 64, 3).network("hybrid", 48, "meta")
    dflash = DFLASH_122B, network.drafter
    for row, tokens, part, close in zip(rows, (1, 3, 13), (None, None, dflash), (0.03, 0.03, 0.06), strict=False):
        distinct = expected_distinct(network.config, tokens)
        counted = bytes_per_step(network.config, network.trunk, 1, row.draft, row.context, distinct, 2, part)
        said = predicted(row, SHAPE, 227e9, "NVIDIA GB10", True)
        assert said is not None
        assert said["bytes_per_step"] == pytest.approx(counted, rel=close), "planner and benchmark count alike"


def test_text_says_what_is_extrapolated_and_what_does_not_count() -> None:
    key = {"weights": "hybrid", "batch": 1, "draft": "mtp:2", "context": 32768}
    row = _row(
        SimpleNamespace(key=key, accept_length=2.6),
        counts=False,
        predicted={"tokens_per_s": 33.3, "low": 21.2, "high": 40.9},
    )
    row["whole"] |= {"source": "extrapolated from 28 and 12 layers"}
    machine = {"gpu": "NVIDIA GB10", "gpu_memory": 120 << 30, "unified": True, "torch": "2.13", "triton": "3.7"}
    report = {
        "machine": {**machine, **box_text.host()}, "bandwidth": {"read": 227e9, "copy": 221e9}, "date": "2026-01-02",
        "shape": SHAPE, "layers": 28, "all_layers": 48, "planned_rows": 1, "command": "make box-report",
        "checks": {"hybrid": {"block": 4, "finite": True, "block_equals_single": False}}, "rows": [row],
    }  # fmt: skip
    posted = box_text.post(report)
    assert (
        "| hybrid | 1 | mtp:2, 2.60 per step assumed | 32,768 | ≈ 36.1 | ≈ 25.0 | 40.0 | ≈ 62% | ≈ 33.3 (21-41) |"
        in posted
    )
    assert "28 of 48 layers were measured" in posted
    assert "DOES NOT COUNT: hybrid, batch 1, mtp:2: 8.0 distinct experts a layer" in posted
    assert "FAILED CHECK: hybrid" in posted
    assert "Checked here" not in posted
    assert "227.0 GB/s read, 221.0 GB/s copied, measured" in posted


def test_folders_are_left_out_of_messages() -> None:
    found = box_text.without_paths("in /srv/people/ann/kernels/step.py: 3 GB/s of 4/5, and/or ./x")
    assert found == "in step.py: 3 GB/s of 4/5, and/or ./x"
    assert "ann" not in found
