"""The list of everything that is measured on a GPU, and what is done about runs that fail or never end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu.record import Run, check_runs, perform, timed_runs

from benchmarks.gpu import box_report
from benchmarks.gpu import decode as gpu_decode
from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu import prefill as gpu_prefill
from benchmarks.gpu import record as gpu_record
from benchmarks.gpu import turn as gpu_turn

PARSERS = {
    "benchmarks/gpu/decode.py": gpu_decode.parse,
    "benchmarks/gpu/prefill.py": gpu_prefill.parse,
    "benchmarks/gpu/turn.py": gpu_turn.parse,
    "benchmarks/gpu/kernels.py": gpu_kernels.parse,
}


def test_every_benchmark_understands_its_options(tmp_path: Path) -> None:
    runs = [*timed_runs(), *check_runs()]
    assert len({run.name for run in runs}) == len(runs)
    parsed = set()
    for run in runs:
        words = run.command(tmp_path)[len(run.before) + 1 :]
        if words[0] in PARSERS:
            assert PARSERS[words[0]](words[1:]).json == str(tmp_path / f"{run.name}.json")
            parsed.add(words[0])
    assert parsed == PARSERS.keys()
    report = next(run for run in runs if run.name == "box-report").command(tmp_path)
    assert box_report.parse(report[3:]).out == tmp_path


def test_checks_name_every_kernel() -> None:
    """A check that no group of words fits would never run."""
    from benchmarks.gpu.checks import checks
    from benchmarks.gpu.weights import SHAPES

    for shape in gpu_record.SHAPES.values():
        names = list(checks(SHAPES[shape]))
        found = [name for words in gpu_record.KERNELS for name in gpu_kernels.chosen(names, words)]
        assert sorted(found) == sorted(names), "each check once"


def test_a_run_that_fails_or_never_ends_is_told_and_leaves_nothing_behind(tmp_path: Path, capsys) -> None:
    running: set[subprocess.Popen[bytes]] = set()
    assert perform(Run("fine", ["-c", "print(1)"]), tmp_path, running)
    assert not perform(Run("wrong", ["-c", "raise SystemExit('a check failed')"]), tmp_path, running)
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(30)'])"
    begun = time.monotonic()
    assert not perform(Run("slow", ["-c", sleeper], seconds=1), tmp_path, running)
    assert time.monotonic() - begun < 10
    assert not running
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ok")
    assert lines[1].endswith("exit status 1: a check failed")
    assert lines[2].endswith("ended after its 1 s")
    assert (tmp_path / "fine.txt").read_text() == "1\n"


@pytest.mark.parametrize("kind", ["timed", "checks"])
def test_after_ctrl_c_nothing_is_left(tmp_path: Path, kind: str) -> None:
    sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    script = (
        "from pathlib import Path\nfrom benchmarks.gpu.record import Run, perform_all\n"
        f"runs = [Run(str(i), ['-c', {sleeper!r}]) for i in range(3)]\n"
        f"timed, checks = (runs, []) if {kind == 'timed'} else ([], runs)\n"
        f"perform_all(timed, checks, Path({str(tmp_path)!r}), 2)"
    )
    begun = subprocess.Popen(
        [sys.executable, "-c", script],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # parallel tests may have it ignored
    )
    expected = 1 if kind == "timed" else 2  # of three: one at a time, or two side by side
    while len(seen := [text for file in tmp_path.glob("*.txt") if (text := file.read_text())]) < expected:
        assert begun.poll() is None
        time.sleep(0.05)
    begun.send_signal(signal.SIGINT)
    assert begun.wait(20) != 0
    time.sleep(0.2)
    assert len(list(tmp_path.glob("*.txt"))) == expected, "no other began"
    for pid in seen:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_exit_status_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(gpu_record, "timed_runs", lambda: [Run("one", ["-c", "pass"]), Run("two", ["-c", "1 / 0"])])
    monkeypatch.setattr(gpu_record, "check_runs", lambda: [Run("three", ["-c", "pass"])])
    gpu_record.main(["--out", str(tmp_path / "new"), "--only", "one,three"])
    assert "2 of 2 ended well" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        gpu_record.main(["--out", str(tmp_path)])
    assert "2 of 3 ended well" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        gpu_record.main(["--only", "four"])
    assert "there are one, two, three." in capsys.readouterr().err
    gpu_record.main(["--list"])
    listed = capsys.readouterr().out
    assert listed.split()[:3] == ["one", "python", "-c"]
    assert sys.executable not in listed, "a command to copy, on whatever machine"
