"""`stoker bench` and `stoker report` as a user calls them, against a mock in a process of its own."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from stoker.bench.document import load, schema
from stoker.bench.environment import command
from stoker.report.spark_arena import COLUMNS

ROOT = Path(__file__).parents[2]
QUICK = {"ttft_s": 0.01, "steps_per_s": 400.0, "chunks": 12, "per_chunk": [1, 3]}


class Server:
    """The mock's address, and how many requests it has seen."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process = process
        self.url, self.asked = process.stdout.readline().strip(), 0
        threading.Thread(target=self._follow, args=(process.stdout,), daemon=True).start()

    def _follow(self, lines: Any) -> None:
        for line in lines:
            self.asked = int(line)


@contextmanager
def mock(**behaviour: Any) -> Iterator[Server]:
    settings = json.dumps({**QUICK, **behaviour})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.mock", settings], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Server(process)
    finally:
        process.kill()
        process.wait()


def stoker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    code = "from stoker.cli.main import run; run()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240, check=False
    )


def test_every_output_of_a_run(tmp_path):
    names = {kind: tmp_path / f"result.{kind}" for kind in ("json", "html", "csv", "markdown")}
    outputs = [part for kind, path in names.items() for part in (f"--{kind}", str(path))]
    with mock() as server:
        done = stoker("bench", server.url, "--suite", "quick", "--runs", "2", "--api-key", "secret-key", *outputs)
    assert done.returncode == 0, done.stderr
    data = json.loads(names["json"].read_text())
    Draft202012Validator(schema()).validate(data)
    assert {"headline", "workloads", "environment", "requests"} <= data.keys()
    assert [row["name"] for row in data["workloads"]] == ["Q&A", "Code", "JSON-KIE", "Agent", "Agent", "uniform_short"]
    assert all(row["completed"] and not row["failed"] for row in data["workloads"])
    assert len(data["requests"]) == sum(row["completed"] for row in data["workloads"])
    assert all(request["prompt_tokens"] == request["prompt_tokens_wanted"] for request in data["requests"])
    assert not any("secret-key" in path.read_text() for path in names.values())
    assert "uniform_short" in done.stdout
    assert "Client:" in done.stdout
    assert "| workload |" in names["markdown"].read_text()
    assert not (tmp_path / "result.json.partial").exists()
    assert data["requests"][0]["chunk_tokens"][:4] == [1, 1, 3, 1]


def test_the_published_schema_is_current():
    assert json.loads((ROOT / "docs" / "bench-schema.json").read_text()) == schema()


@pytest.mark.parametrize("tokenize", [True, False])
def test_a_run_in_which_everything_is_rejected(tokenize, tmp_path):
    result = tmp_path / "r.json"
    with mock(
        tokenize=tokenize, error_every=1, error_status=400, error_text="prompt too long: 131,073 > 131,072"
    ) as server:
        done = stoker(
            "bench", server.url, "--suite", "single", "--workload", "Code", "--runs", "3", "--json", str(result)
        )
    assert done.returncode == 1
    found = load(result)
    assert (found.headline.completed, found.headline.failed) == (0, 3)
    assert (found.workloads[0].completed, found.workloads[0].failed) == (0, 3)
    assert "prompt too long: 131,073 > 131,072" in done.stdout
    assert "NOTHING MEASURED" in done.stdout


def test_mistakes_of_the_user_are_sentences():
    for arguments, words in (
        (("bench", "http://127.0.0.1:9"), "Is a server running there?"),
        (("bench", "nonsense://x"), "is no address of a server"),
        (("bench", "localhost:9", "--json", "/no/such/place/r.json"), "there is no directory"),
        (("report", "/nowhere.json"), "cannot be read"),
    ):
        done = stoker(*arguments)
        assert done.returncode == 2
        assert words in done.stderr.replace("\n", " ")
        assert "Traceback" not in done.stderr
    with mock() as server:
        done = stoker("bench", server.url, "--suite", "fastest")
        assert "no suite called 'fastest'" in done.stderr
        done = stoker("bench", server.url, "--model", "other")
        assert "serves mock, not other" in done.stderr


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(tmp_path):
    result = tmp_path / "r.json"
    runs = 8  # so many that there is something left to do however late the signal comes
    arguments = ["--suite", "single", "--runs", str(runs), "--json", str(result)]
    arguments += [part for name in ("Q&A", "Code", "Math") for part in ("--workload", name)]
    with mock(ttft_s=0.25) as server:
        code = "from stoker.cli.main import run; run()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "bench", server.url, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # parallel tests may have it ignored
        )
        deadline = time.monotonic() + 120
        while server.asked < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "The same command goes on" in errors
        first = load(result)
        assert not first.complete
        assert "Interrupted" in first.headline.text
        assert first.headline.completed >= 4
        kept, asked = first.headline.completed, server.asked
        done = stoker("bench", server.url, *arguments)
        time.sleep(0.2)
        assert done.returncode == 0, done.stderr
        assert "Going on" in done.stderr
        again = load(result)
        assert again.complete
        assert [row.completed for row in again.workloads] == [runs] * 3
        # what was missing, a warm-up per open workload, a first probe
        assert server.asked - asked <= 3 * runs - kept + 3 + 2
        assert not result.with_name("r.json.partial").exists()
        assert len({request.started_s for request in again.requests}) == 3 * runs


def test_a_server_that_dies_leaves_what_was_measured(tmp_path):
    result = tmp_path / "r.json"
    with mock(ttft_s=0.3) as server:
        code = "from stoker.cli.main import run; run()"
        arguments = [
            "--suite",
            "single",
            "--runs",
            "15",
            "--json",
            str(result),
            "--workload",
            "Math",
            "--workload",
            "Code",
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", code, "bench", server.url, *arguments], stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 120
        while server.asked < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        server.process.kill()
        process.communicate(timeout=100)
    assert process.returncode == 1
    found = load(result)
    assert not found.complete
    assert found.headline.completed >= 3
    assert any(warning.startswith("Stopped early:") for warning in found.warnings)


def test_another_measurement_does_not_continue_an_unfinished_one(tmp_path):
    partial = tmp_path / "r.json.partial"
    partial.write_text(json.dumps({"identity": {"suite": "other"}}) + "\n")
    with mock() as server:
        one = (
            "bench",
            server.url,
            "--suite",
            "single",
            "--workload",
            "Math",
            "--runs",
            "1",
            "--json",
            str(tmp_path / "r.json"),
        )
        done = stoker(*one)
        assert done.returncode == 2
        assert "another suite" in done.stderr.replace("\n", " ")
        assert stoker(*one, "--fresh").returncode == 0


def test_two_servers_take_turns_and_are_compared(tmp_path):
    result, page = tmp_path / "r.json", tmp_path / "r.html"
    with mock(steps_per_s=20.0, chunks=8) as slow, mock(steps_per_s=200.0, chunks=8) as quick:
        options = ("--suite", "single", "--workload", "Math", "--runs", "5", "--json", str(result), "--html", str(page))
        done = stoker("bench", slow.url, "--against", quick.url, *options)
    assert done.returncode == 0, done.stderr
    found = load(result)
    assert [request.server for request in found.requests] == ["A", "B"] * 5
    [speed] = [d for d in found.differences if d.metric == "decode_tokens_per_s"]
    assert speed.paired
    assert speed.verdict == "better"
    assert speed.change > 0.5  # ten times as fast, on a machine that is not busy
    assert "B is faster on Math" in done.stdout
    assert "B against A" in page.read_text()


def test_two_results_are_compared_and_noise_is_called_noise(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    with mock() as server:
        for path in (a, b):
            done = stoker(
                "bench", server.url, "--suite", "single", "--workload", "Math", "--runs", "5", "--json", str(path)
            )
            assert done.returncode == 0
    done = stoker("report", str(a), str(a), "--json", "-")
    assert done.returncode == 0
    found = json.loads(done.stdout)  # the only thing on stdout
    assert {row["verdict"] for row in found["differences"]} == {"within the noise"}
    assert "smaller than the noise" in done.stderr
    shown = stoker("report", str(a), str(b))
    assert "B against A" in shown.stdout
    assert stoker("report", str(a)).stdout.count("Math") >= 1


def test_the_csv_has_llama_benchys_columns_and_names(tmp_path):
    results = pytest.importorskip("llama_benchy.results")
    out = tmp_path / "theirs.csv"
    results.BenchmarkResults().save_report(str(out), "csv")
    assert next(csv.reader(io.StringIO(out.read_text()))) == COLUMNS
    ours = tmp_path / "ours.csv"
    with mock() as server:
        options = ("--suite", "depth", "--depths", "0,4096", "--concurrency", "1,2", "--runs", "1", "--csv", str(ours))
        done = stoker("bench", server.url, *options)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(ours.read_text())))
    assert [row["test_name"] for row in rows] == [
        *("pp2048 (c1)", "tg128 (c1)", "pp2048 (c2)", "tg128 (c2)"),
        *("ctx_pp @ d4096 (c1)", "ctx_tg @ d4096 (c1)", "pp2048 @ d4096 (c1)", "tg128 @ d4096 (c1)"),
        *("ctx_pp @ d4096 (c2)", "ctx_tg @ d4096 (c2)", "pp2048 @ d4096 (c2)", "tg128 @ d4096 (c2)"),
    ]
    assert all(float(row["t_s_mean"]) > 0 for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        ("--suite", "sweep", "--concurrency", "1,4"),
        ("--suite", "sweep", "--rate", "20", "--seconds", "0.5"),
        ("--suite", "mix", "--workload", "uniform_short", "--seconds", "0.5"),
        ("--suite", "prefix", "--workload", "Long-RAG-8K"),
        ("--suite", "soak", "--seconds", "0.5", "--workload", "uniform_short"),
    ],
    ids=lambda options: " ".join(options[1:4:2]),
)
def test_other_suites_run(options, tmp_path):
    result = tmp_path / "r.json"
    with mock() as server:
        done = stoker(
            "bench", server.url, *options, "--runs", "1", "--json", str(result), "--html", str(tmp_path / "r.html")
        )
    assert done.returncode == 0, done.stderr
    found = load(result)
    assert found.headline.completed > 0
    assert found.headline.failed == 0
    if "prefix" in options:
        assert [row.variant for row in found.workloads] == ["cold", "warm"]
        assert "Long-RAG-8K: first token after" in found.headline.text
    if "--rate" in options:
        assert found.headline.completed == 20 * 0.5  # the rate asked for, at random moments
        assert "at 20 requests/s" in found.headline.text.lower()


def test_prompts_of_the_users_own(tmp_path):
    prompts, result = tmp_path / "p.json", tmp_path / "r.json"
    prompts.write_text(
        json.dumps({"mine": ["Once upon a time", "In the end"], "chat": [[{"role": "user", "content": "Hi"}]]})
    )
    with mock() as server:
        done = stoker("bench", server.url, "--prompts", str(prompts), "--runs", "2", "--json", str(result))
    assert done.returncode == 0, done.stderr
    found = load(result)
    assert [(row.name, row.completed) for row in found.workloads] == [("mine", 4), ("chat", 2)]
    assert {request.prompt_tokens for request in found.requests if request.workload == "mine"} == {4, 3}


def test_options_are_shown_without_loading_client_or_schema():
    code = "import sys, stoker.cli.bench, stoker.cli.report; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not {"aiohttp", "jinja2", "msgspec", "numpy"} & set(done.stdout.split())


def test_keys_are_not_written_down():
    assert command(["x", "bench", "u", "--api-key", "abc", "--runs", "2"]) == "stoker bench u --api-key *** --runs 2"
    assert command(["x", "--api-key=abc"]) == "stoker --api-key=***"
