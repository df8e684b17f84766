"""`stoker up` as a command: with a fake engine what goes wrong, and with the embedded model that it is true."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from stoker.cli.progress import error_console
from stoker.cli.up import Progress
from stoker.demo import EMBEDDED
from stoker.errors import StokerError
from stoker.recipes.load import load
from stoker.up import control, journal, state
from stoker.up.bring_up import Options, Up
from stoker.up.journal import Journal
from tests.support.services import Clients, ask, chat, processes_of, state_home, wait
from tests.support.stand_in_hub import COMMIT, Fault, StandInHub
from tests.support.stoker_up import made_up_memory

ROOT = Path(__file__).parents[2]
RECIPE = """\
name = "{name}"
title = "for a test"
plan = "demo"
[model]
source = "demo"
[serve]
device = "cpu"
{serve}
arguments = [{arguments}]
{more}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with state_home(tmp_path), made_up_memory():
        yield tmp_path
    wait(lambda: not processes_of(tmp_path))


def recipe(home: Path, name: str, more: str = "", serve: str = "", **fake: object) -> str:
    """A file of a recipe; `fake` is what the engine is told."""
    arguments = ", ".join(f'"--fake", "{key}={value}"' for key, value in fake.items())
    path = home / f"{name}.toml"
    path.write_text(RECIPE.format(name=name, serve=serve, arguments=arguments, more=more))
    return str(path)


def begin(*arguments: str, real: bool = False) -> "subprocess.Popen[str]":
    module = "stoker" if real else "tests.support.stoker_up"
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stoker(*arguments: str, real: bool = False) -> tuple[int, str, str]:
    process = begin(*arguments, real=real)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def here(*arguments: str) -> tuple[int, str, str]:
    """The same in this process, for commands that start nothing: it does not wait for imports."""
    found = CliRunner().invoke(app, list(arguments))
    if isinstance(found.exception, StokerError):
        return 2, found.stdout, str(found.exception)
    return found.exit_code, found.stdout, found.stderr


def up(file: str, *options: str) -> tuple[int, Any, str]:
    """Exit status, receipt and what was said."""
    status, out, err = stoker("up", file, "--port", "0", "--json", *options)
    return status, json.loads(out) if out else None, err


def written() -> Journal | None:
    try:
        return msgspec.json.decode(journal.path_of("default").read_bytes(), type=Journal)
    except (OSError, msgspec.MsgspecError):
        return None


def answers(home: Path) -> list[str]:
    """Of all engines, in their logs."""
    logs = sorted((home / "services" / "default").glob("engine-*.log"))
    return [line for log in logs for line in log.read_text().splitlines() if line.startswith("answer")]


def test_a_service_is_up_once_and_again_repeats_nothing(home: Path) -> None:
    file = recipe(home, "one", more='[expected]\nstart_s = { value = 60, source = "here" }')
    status, receipt, said = up(file)
    assert status == 0, said
    assert receipt["kept"] is True
    assert [line["what"] for line in receipt["expected"]][-2:] == ["memory", "start"] or receipt["memory_bytes"] == 0
    assert {"Q&A", "Code", "JSON-KIE", "general"} <= {row["workload"] for row in receipt["measured"]}
    assert all(row["failed"] == 0 for row in receipt["measured"])
    assert receipt["smoke"]["tool_call"] == 'get_weather({"city": "Paris"})'
    assert receipt["smoke"]["cached_tokens"] > 0
    assert receipt["greedy_sha256"]
    assert receipt["phases"][0]["name"] == "starting"
    body = json.loads(chat(receipt["url"], model="one")[1])
    assert body["choices"][0]["message"]["content"].startswith("one one")
    pid, count = control.Control("default").status().serving.pid, len(answers(home))  # type: ignore[union-attr]

    status, out, said = stoker("up", file, "--port", "0")
    assert status == 0, said
    assert "nothing had to be repeated" in out
    assert "runs already" in said
    assert f"ANTHROPIC_BASE_URL={receipt['url']}" in out
    assert control.Control("default").status().serving.pid == pid  # type: ignore[union-attr]
    assert len(answers(home)) == count
    assert len(list((home / "receipts").iterdir())) == 1

    status, out, _ = here("status")
    assert (status, "serving: one" in out) == (0, True)
    assert stoker("down")[0] == 0
    assert here("status")[0] == 1


def stopped(process: "subprocess.Popen[str]") -> bool:
    """At the stage where it was told to stop."""
    assert process.poll() is None, process.communicate()
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_what_is_killed_at_one_stage_after_the_other_goes_on_there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build is made up; the real one is killed below."""
    probes, builds = home / "probes", home / "builds"
    monkeypatch.setenv("STOKER_TEST_PROBES", str(probes))
    monkeypatch.setenv("STOKER_TEST_BUILDS", str(builds))
    file = recipe(home, "one", more='[build]\nto = "bf16"', wait=home / "go", hold=home / "hold")
    for stage in ("plan", "probe", "fetch", "build", "inspect", "start"):
        monkeypatch.setenv("STOKER_TEST_HOLD", stage)
        process = begin("up", file, "--port", "0", "--json")
        wait(partial(stopped, process))
        kill(process)
        found = written()
        assert found
        assert (found.stage, control.status("default")) == (stage, None), "nothing has been started yet"
    monkeypatch.delenv("STOKER_TEST_HOLD")

    process = begin("up", file, "--port", "0", "--json")
    wait(lambda: (found := control.status("default")) and found.candidate and found.candidate.pid)
    kill(process)  # while the engine starts
    (home / "go").touch()

    def reached(count: int) -> bool:
        return len(answers(home)) >= count

    for count, stage in ((1, "smoke test"), (9, "measure")):
        (home / "hold").write_text(str(count))
        process = begin("up", file, "--port", "0", "--json")
        wait(partial(reached, count))
        kill(process)  # while it waits for that answer
        found = written()
        assert found
        assert found.stage == stage
    smoked = found.smoke if found else None
    (home / "hold").unlink()

    status, receipt, said = up(file)
    assert status == 0, said
    assert receipt["smoke"] == msgspec.to_builtins(smoked), "it was not tested again"
    assert {row["workload"] for row in receipt["measured"]} == {"Q&A", "Code", "JSON-KIE", "general"}
    assert set(receipt["stages"]) == {"plan", "probe", "fetch", "build", "inspect", "start", "smoke test", "measure"}
    assert [told.read_text().split() for told in (probes, builds)] == [["probe"], ["build"]]
    log = Path(control.Control("default").status().serving.log)  # type: ignore[union-attr]
    assert log.name == "engine-1.log", "the engine that had been started was taken over"
    assert log.read_text().count("--- stoker up: one starts") == 1


def test_two_at_once_do_not_meet(home: Path) -> None:
    file = recipe(home, "one", wait=home / "go")
    first = begin("up", file, "--port", "0", "--no-measure", "--json")
    wait(lambda: written())
    status, _, said = stoker("up", file, "--port", "0")
    assert status == 2
    assert f"is being changed by `stoker up one` (pid {first.pid}" in said
    assert here("down")[0] == 2
    (home / "go").touch()
    out, said = first.communicate()
    assert first.returncode == 0, said
    assert json.loads(out)["kept"] is None


@pytest.mark.parametrize(
    ("fault", "serve", "says", "mode"),
    [
        ({"tools": "none"}, "", "forced tool call holds no call", "serves on meanwhile"),
        ({"again": "other"}, "memory_gib = 9000", "differ at token 1", r"ends first: .* GiB are free, and 900\d\.\d"),
        ({"die": "1"}, "memory_gib = 9000", "out of memory: 3 GiB of 2 GiB", "ends first"),
    ],
)
def test_a_recipe_that_fails_leaves_the_old_one_serving(
    home: Path, fault: dict[str, str], serve: str, says: str, mode: str
) -> None:
    status, receipt, said = up(recipe(home, "old"), "--no-measure")
    assert status == 0, said
    with Clients(receipt["url"], model="old", max_tokens=4) as clients:
        wait(lambda: clients.seen)
        status, nothing, said = up(recipe(home, "new", serve=serve, **fault))
        before = len(clients.seen)
        wait(lambda: len(clients.seen) > before + 4)
    assert (status, nothing) == (2, None)
    said = " ".join(said.split())
    assert says in said
    assert "old serves on." in said
    assert re.search(mode, said)
    assert not clients.errors
    assert {(code, retry) for code, retry, _ in clients.seen} <= {(200, False), (503, True)}
    assert {text for code, _, text in clients.seen if code == 200} == {"old old old old "}
    found = control.Control("default").status()
    assert found.state == "serving"
    assert found.serving
    assert found.serving.deployment.recipe == "old"


def test_a_first_recipe_that_fails_leaves_nothing(home: Path) -> None:
    status, _, said = up(recipe(home, "bad", cache="none"))
    assert status == 2
    assert "nothing of it was cached" in " ".join(said.split())
    assert "Nothing is left running." in " ".join(said.split())
    wait(lambda: not processes_of(home))


def test_a_change_takes_over_and_the_old_one_ends(home: Path) -> None:
    assert up(recipe(home, "old"), "--no-measure")[0] == 0
    url = control.Control("default").status().url
    status, out, said = stoker("up", recipe(home, "new"), "--no-measure", "--json")
    assert status == 0, said
    assert json.loads(out)["url"] == url, "the address stays, whatever the recipe says"
    assert f"stays at 127.0.0.1, port {url.rpartition(':')[2]}" in said
    assert json.loads(chat(url)[1])["choices"][0]["message"]["content"].startswith("new")
    wait(lambda: not control.Control("default").status().draining)


def test_a_promise_that_is_not_kept_is_told_and_ends_with_1(home: Path) -> None:
    more = '[[expected.speed]]\nworkload = "Q&A"\ntokens_per_s = 1e6\nsource = "a dream"'
    status, receipt, _ = up(recipe(home, "one", more=more))
    assert status == 1
    assert receipt["kept"] is False
    (line,) = [line for line in receipt["expected"] if line["kept"] is False]
    assert (line["what"], line["source"]) == ("Q&A", "a dream")
    status, out, _ = stoker("up", str(home / "one.toml"), "--port", "0")
    assert (status, "not kept: Q&A" in out) == (1, True)


def test_what_does_not_fit_is_refused_with_numbers_before_anything_starts(home: Path) -> None:
    file = home / "large.toml"
    file.write_text('name = "large"\ntitle = "t"\nplan = "122b"\nweights = "bf16"\n[model]\nsource = "hf:a/b"\n')
    status, _, said = here("up", str(file), "--box", "spark", "--port", "0")
    said = " ".join(said.split())
    assert status == 2
    assert "does not fit DGX Spark 128 GB" in said
    assert "GiB are needed and 121.7 are there" in said
    wait(lambda: not processes_of(home))


def refused(file: str, **options: Any) -> str:
    """The sentence. Nothing may have been begun."""
    with pytest.raises(StokerError) as raised:
        Up(load(file), Options(**options), Progress(error_console())).run()
    assert written() is None
    assert control.status("default") is None
    return str(raised.value)


def test_what_could_not_be_served_is_refused_before_anything_is_fetched(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused(recipe(home, "one"), port=port)
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use. Stop what listens there" in said
    service = control.Control.start("other", "127.0.0.1", 0)
    port = int(service.status().url.rpartition(":")[2])
    assert "Service other listens there: end it (stoker down other)" in refused(recipe(home, "one"), port=port)
    assert "Name or service not known" in refused(recipe(home, "one"), host="nowhere.invalid", port=1)
    path = Path(recipe(home, "one"))
    path.write_text(path.read_text().replace('source = "demo"', 'source = "models/mine"'))
    assert f"there is no directory {home}/models/mine" in refused(str(path), port=0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", folder], capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        with state_home(folder):
            yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_a_sentence_and_the_same_command_goes_on(small_disk: Path, tmp_path: Path) -> None:
    file = recipe(tmp_path, "one")
    status, _, said = up(file, "--no-measure")
    assert status == 2
    assert re.search(r"error: \S+/up.json cannot be written: No space left on device. Make room there and", said)
    assert not list(small_disk.rglob("*.new")), "nothing half-written is left"
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    status, receipt, said = up(file, "--no-measure")
    assert status == 0, said
    assert receipt["smoke"]["identical"]


def test_shell_steps_run_once_and_only_if_agreed_to(home: Path) -> None:
    more = """
[[shell]]
run = "echo before >> steps"
[[shell]]
run = "echo $STOKER_URL >> steps"
when = "after"
"""
    file = recipe(home, "one", more=more)
    status, _, said = up(file, "--no-measure")
    assert status == 2
    assert "echo before >> steps" in said
    assert "--yes" in said
    assert not (home / "steps").exists()
    assert up(file, "--no-measure", "--yes")[0] == 0
    assert up(file, "--no-measure", "--yes")[0] == 0
    lines = (home / "steps").read_text().splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith("http://127.0.0.1:")
    assert len(lines) == 2


def test_a_dry_run_prints_every_command_and_does_nothing(home: Path) -> None:
    file = recipe(home, "one", more='[[shell]]\nrun = "touch it"\n[build]\nquantize = "int4"')
    status, out, said = here("up", file, "--dry-run", "--port", "0")
    assert status == 0, said
    for part in ("build --base", "--quantize int4", "touch it", "stoker.up.keeper", "--served-model-name one"):
        assert part in out
    status, out, _ = here("up", "qwen3.5-122b-hybrid-mtp2", "--box", "spark", "--dry-run", "--json", "--port", "0")
    found = json.loads(out)
    assert [action["stage"] for action in found["actions"]] == ["fetch", "build", "keeper", "start"]
    assert found["actions"][0]["commands"] == ["hf download Intel/Qwen3.5-122B-A10B-int4-AutoRound"]
    assert (status, found["problems"]) == (0, [])
    assert found["plan"]["fits"]
    assert not (home / "services").exists()
    assert not (home / "it").exists()


def test_no_token_and_no_key_reaches_a_file_or_the_screen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    monkeypatch.setenv("STOKER_API_KEY", "sesame-open")
    file = recipe(home, "one", serve='host = "0.0.0.0"')
    outputs = [here("up", file, "--dry-run"), here("up", file, "--dry-run", "--json")]
    status, receipt, said = up(file, "--no-measure")
    assert status == 0, said
    assert chat(receipt["url"])[0] == 401, "the engine asks for the key"
    assert ask(f"{receipt['url']}/v1/models", headers={"authorization": "Bearer sesame-open"})[0] == 200
    outputs += [stoker("up", file, "--port", "0", "--no-measure"), here("status", "--json"), here("logs")]
    assert "HF_TOKEN is ***" in outputs[-1][1]
    assert "YOUR_KEY" in outputs[2][1]
    files = [path for path in home.rglob("*") if path.is_file()]
    assert {"service.json", "up.json", "engine-1.log"} <= {path.name for path in files}
    assert [path.name for path in files if b"sesame" in path.read_bytes()] == []
    assert "sesame" not in json.dumps([receipt, said, outputs])


def test_a_fetch_that_was_killed_goes_on_and_the_receipt_names_the_commit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    name = "model-00001-of-00003.safetensors"
    path = Path(recipe(home, "far"))
    path.write_text(path.read_text().replace('source = "demo"', 'source = "hf:owner/model"'))
    with StandInHub(EMBEDDED).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.faults += [Fault(name), Fault(name, keep=3_000_000, hold=threading.Event())]
        process = begin("up", str(path), "--port", "0", "--no-measure")
        wait(lambda: hub.sent_by_file[name] > 2_000_000)
        process.kill()
        process.communicate()
        found = written()
        assert found
        assert found.stage == "fetch"
        hub.faults.clear()
        sent = hub.sent_by_file[name]
        status, receipt, said = up(str(path), "--no-measure")
        assert status == 0, said
        assert hub.sent_by_file[name] - sent < (EMBEDDED / name).stat().st_size, "what had come was kept"
    (revision,) = receipt["revisions"]
    assert (revision["source"], revision["revision"]) == ("hf:owner/model", COMMIT)
    model = receipt["launches"][0]["command"]
    assert model[model.index("--model") + 1].endswith(f"snapshots/{COMMIT}")


@pytest.mark.long
def test_a_build_that_was_killed_goes_on_and_is_found_again(home: Path) -> None:
    file = recipe(home, "built", more='[build]\nto = "bf16"')
    process = begin("up", file, "--port", "0", "--no-measure")
    builds = home / "cache" / "stoker" / "builds"
    wait(lambda: builds.is_dir() and [path for path in builds.rglob("*") if path.is_file()])
    process.kill()
    process.communicate()
    wait(lambda: not processes_of(home))
    status, receipt, said = up(file, "--no-measure")
    assert status == 0, said
    built = Path(receipt["build"])
    assert built.parent == builds
    assert (built / "stoker.json").exists()
    assert [path.name for path in builds.iterdir()] == [built.name]
    stamp = (built / "stoker.json").stat().st_mtime_ns
    assert stoker("down", "--now")[0] == 0
    assert up(file, "--no-measure")[0] == 0
    assert (built / "stoker.json").stat().st_mtime_ns == stamp


def test_a_service_can_be_under_systemd(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for systemctl runs what the unit says."""
    program = home / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\n" + SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("STOKER_API_KEY", "sesame-open")
    status, _, said = up(recipe(home, "one"), "--no-measure", "--service")
    assert status == 0, said
    assert f"write STOKER_API_KEY=... into {home}/config/stoker/default.env" in said
    assert "sesame" not in said
    unit = home / "config" / "systemd" / "user" / "stoker-default.service"
    assert "stoker.up.keeper" in unit.read_text()
    assert "sesame" not in unit.read_text()
    if analyze := shutil.which("systemd-analyze"):
        checked = subprocess.run(
            [analyze, "--user", "verify", unit], env={**os.environ, "XDG_RUNTIME_DIR": str(home)}, capture_output=True
        )
        assert (checked.returncode, checked.stderr) == (0, b"")
    assert (home / "bin" / "calls").read_text().split("\n")[:4] == [
        "show-environment",
        "daemon-reload",
        "enable stoker-default.service",
        "start stoker-default.service",
    ]
    assert stoker("down", "--now")[0] == 0
    assert not unit.exists()


SYSTEMCTL = """\
import os, re, shlex, subprocess, sys
from pathlib import Path

arguments = sys.argv[2:]
here = Path(__file__).parent
with (here / "calls").open("a") as file:
    file.write(" ".join(arguments) + "\\n")
if arguments[0] == "start":
    unit = Path(os.environ["XDG_CONFIG_HOME"]) / "systemd" / "user" / arguments[1]
    command = shlex.split(re.search("ExecStart=(.*)", unit.read_text())[1])
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, start_new_session=True, stdin=null, stdout=null, stderr=null)
    (here / "pid").write_text(str(process.pid))
if arguments[0] == "is-active":
    sys.exit(0 if Path("/proc", (here / "pid").read_text()).exists() else 3)
"""


def test_the_embedded_model_is_up_in_earnest(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its engine one thread, since other tests take the others. Killed while it starts, and again."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = begin("up", "demo", "--port", "0", "--no-measure", "--json", real=True)
    wait(lambda: (found := control.status("default")) and found.candidate)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    began = time.monotonic()
    status, out, said = stoker("up", "demo", "--port", "0", "--no-measure", "--json", real=True)
    assert status in (0, 1), said
    receipt = json.loads(out)
    assert receipt["kept"] is (status == 0), "on a loaded machine a start may take longer than is promised"
    assert receipt["smoke"]["identical"]
    assert receipt["smoke"]["cached_tokens"] >= receipt["smoke"]["long_prompt_tokens"] // 2
    assert receipt["smoke"]["tool_choice"] == "auto"
    assert receipt["probe"]["speeds"][0]["gemv_gb_s"] > 0
    assert receipt["start_s"] < time.monotonic() - began + 60
    assert os.stat(receipt["file"]).st_mode & 0o077 == 0
    assert state.read("default") is not None
