"""A service with its keeper as a process, and engines that hang, die and are changed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.engines.engine import Launch
from stoker.errors import StokerError
from stoker.up import control, state
from stoker.up.control import Control
from tests.support.services import (
    Clients,
    ask,
    chat,
    deploy,
    deployment,
    launch,
    processes_of,
    state_home,
    wait,
    wait_status,
)


@pytest.fixture
def home(request, tmp_path):
    with state_home(tmp_path, **getattr(request, "param", {})):
        yield tmp_path
    wait(lambda: not processes_of(tmp_path))


@pytest.fixture
def service(home):
    return Control.start("default", "127.0.0.1", 0)


def wait_restart(service, number: int) -> Any:
    return wait_status(service, lambda status: status.serving.restarts == number and status.state == "serving")


def wait_fault(service, pid: int) -> Any:
    return wait_status(service, lambda status: status.state == "failed" or status.serving.pid != pid)


def test_a_candidate_serves_once_it_is_accepted(service):
    url = service.status().url
    status, body, headers = chat(url)
    assert (status, headers["retry-after"]) == (503, "5")
    assert "No model is deployed yet" in json.loads(body)["error"]["message"]

    service.apply(deployment("one", "--load", "0.3"), "beside")
    found = wait_status(service, lambda status: status.candidate.state == "ready")
    assert found.state == "starting"
    assert [each.name for each in found.candidate.phases] == ["starting", "loading", "compiling"]
    assert chat(found.candidate.address)[0] == 200, "the smoke test reaches it at its own address"
    assert chat(url)[0] == 503, "clients do not, before it is accepted"

    service.accept()
    assert service.status().state == "serving"
    assert json.loads(chat(url)[1])["choices"][0]["message"]["content"] == "one one one one "
    saved: Any = state.read("default")
    assert saved
    assert saved.status.serving.deployment == deployment("one", "--load", "0.3")


def test_a_change_beside_ends_what_runs_and_loses_nothing(service):
    old = deploy(service, deployment("old"))
    url = service.status().url
    ended = []
    stream = threading.Thread(target=lambda: ended.append(chat(url, stream=True, tokens=30, delay=0.05)))
    stream.start()
    wait(lambda: b"running 1" in ask(f"{old.address}/metrics")[1])
    with Clients(url) as clients:
        service.apply(deployment("new", "--load", "0.3"), "beside")
        wait_status(service, lambda status: status.candidate.state == "ready")
        assert service.status().serving.state == "ready"
        service.accept()
        accepted = len(clients.seen)
        wait(lambda: len(clients.seen) > accepted + 10)
        assert service.status().draining, "the old engine still ends the stream"
    stream.join()
    wait_status(service, lambda status: not status.draining)
    assert not psutil.pid_exists(old.pid)
    assert not clients.errors
    assert {each[0] for each in clients.seen} == {200}, "nobody saw anything of the change"
    assert {each[2] for each in clients.seen} == {"old old old old ", "new new new new "}
    assert clients.seen[-1][2].startswith("new")
    status, body, _ = ended[0]
    assert status == 200
    assert body.count(b'"old "') == 30
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("how", ["dies", "is rejected", "is not ready in time"])
def test_a_swap_that_fails_is_rolled_back(service, how):
    old = deploy(service, deployment("old"))
    url = service.status().url
    ended: list[Any] = []
    stream = threading.Thread(target=lambda: ended.append(chat(url, stream=True, tokens=20, delay=0.02)))
    with Clients(url) as clients:
        stream.start()
        wait(lambda: b"running 0" not in ask(f"{old.address}/metrics")[1])
        wait(lambda: clients.seen)
        if how == "dies":
            service.apply(deployment("new", "--die-loading"), "swap")
        elif how == "is rejected":
            service.apply(deployment("new"), "swap")
            wait_status(service, lambda status: status.candidate.state == "ready")
            assert service.status().serving.state == "stopped", "the old one made room"
            assert chat(url)[0] == 503
            service.reject("the smoke test found no tool call")
        else:
            service.apply(deployment("new", "--never-ready", start_timeout_s=0.5), "swap")
        found = wait_status(service, lambda status: status.state == "serving")
        before = len(clients.seen)
        wait(lambda: len(clients.seen) > before + 4)
    stream.join()
    assert ended[0][1].count(b'"old "') == 20, "what it had begun it ended"
    assert ended[0][1].endswith(b"data: [DONE]\n\n")
    assert not clients.errors
    assert {(each[0], each[1]) for each in clients.seen} == {(200, False), (503, True)}
    assert {each[2] for each in clients.seen} == {"", "old old old old "}
    expected = {
        "dies": r"exit code 7.* out of memory: 3 GiB of 2 GiB$",
        "is rejected": r"no tool call",
        "is not ready in time": r"was not ready within 0.5 s; it was (starting|loading|compiling)",
    }[how]
    assert re.search(expected, found.warnings[0])
    if how != "is rejected":
        assert re.search(expected, found.candidate.fault)
        assert found.candidate.state == "failed"


def test_a_rejected_candidate_beside_changes_nothing(service):
    deploy(service, deployment("old"))
    with Clients(service.status().url) as clients:
        service.apply(deployment("new"), "beside")
        new = wait_status(service, lambda status: status.candidate.state == "ready").candidate
        service.reject("it answers nonsense")
    assert {each[::2] for each in clients.seen} == {(200, "old old old old ")}
    assert service.status().candidate is None
    assert not psutil.pid_exists(new.pid)
    with pytest.raises(StokerError, match="no candidate"):
        service.accept()


@pytest.mark.parametrize("home", [{"answer_s": 60.0, "silent_s": 1.0}], indirect=True)
def test_a_stopped_engine_is_restarted_and_five_times_in_a_row_are_a_failure(service):
    deploy(service, deployment("one"))
    url = service.status().url
    stopped = 0
    while (found := wait_status(service, lambda status: status.state in ("serving", "failed"))).state == "serving":
        before = found.serving
        if before.pid:
            os.kill(before.pid, signal.SIGSTOP)
            stopped, began = stopped + 1, time.monotonic()
            found = wait_fault(service, before.pid)
            silent = re.search(r"did not answer /health and /metrics for (\d+) s.*wedged", found.serving.fault)
            assert silent
            assert int(silent[1]) < 10, "the time that one question may take does not count"
            assert time.monotonic() - began < 1.0 + 15.0, "for a loaded machine"
    assert stopped <= 5
    assert re.search(r"wedged \(after 4 restarts in a row\)", found.serving.fault)
    assert found.serving.restarts == 4
    assert "restarted 4 times within the last hour" in found.warnings[0]
    status, body, headers = chat(url)
    assert (status, headers["retry-after"]) == (503, "60")
    assert "stoker status" in body.decode()
    deploy(service, deployment("one"), "swap")
    assert chat(url)[0] == 200, "and it can be started again"


def test_an_answered_request_ends_a_row_of_restarts(service):
    deploy(service, deployment("one", restarts=1))
    for number in (1, 2, 3):
        os.kill(service.status().serving.pid, signal.SIGKILL)
        wait_restart(service, number)
        assert chat(service.status().url)[0] == 200


def test_tokens_that_stop_are_a_wedge_and_a_long_prompt_is_none(service):
    deploy(service, deployment("one", stall_s=1.5))
    url = service.status().url
    assert chat(url, stream=True, prompt_s=4.0)[0] == 200
    assert service.status().serving.restarts == 0, "its work went on all the time"
    status, body, _ = chat(url, stream=True, do="stall")
    assert status == 200
    *_, last = body.decode().strip().split("\n\n")
    assert "ended within this answer" in json.loads(last.removeprefix("data: "))["error"]["message"]
    found = wait_status(service, lambda status: status.state == "serving")
    assert re.search("no token came for .* wedged", found.serving.fault)
    assert found.serving.restarts == 1


def test_an_engine_that_dies_ends_streams_with_an_error_and_is_restarted(service):
    deploy(service, deployment("one"))
    url = service.status().url
    status, body, _ = chat(url, stream=True, do="die")
    assert status == 200
    assert b'"one "' in body
    assert '"server_error"' in body.decode().strip().split("\n\n")[-1]
    wait_restart(service, 1)
    status, _, headers = chat(url, do="die")
    assert status == 503
    assert "retry-after" in headers
    found = wait_restart(service, 2)
    assert "exit code 3" in found.serving.fault


def test_a_client_that_leaves_frees_its_slot(service):
    serving = deploy(service, deployment("one"))
    host, port = service.status().url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        body = json.dumps({"stream": True, "tokens": 1000, "delay": 0.02}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert client.recv(100)
    wait(lambda: b"running 0\n" in ask(f"{serving.address}/metrics")[1])
    assert b"cancelled 1\n" in ask(f"{serving.address}/metrics")[1]


def test_a_killed_keeper_leaves_no_engine_and_its_service_begins_again(home, service):
    serving = deploy(service, deployment("one", "--child"))
    keeper = service.status().keeper_pid
    os.kill(keeper, signal.SIGKILL)
    wait(lambda: not processes_of(home))
    assert not psutil.pid_exists(serving.pid)
    found: Any = control.status("default")
    assert (found.state, found.serving.state) == ("gone", "stopped")
    assert f"pid {keeper}" in found.warnings[0]
    with pytest.raises(StokerError, match="has no keeper"):
        service.status()

    saved: Any = state.read("default")
    again = Control.start("default", saved.host, saved.port)
    wait_status(again, lambda status: status.state == "serving")
    assert chat(again.status().url)[0] == 200
    again.stop()
    found = control.status("default")
    assert found.state == "stopped"
    assert Control.start("default", saved.host, saved.port).status().state == "empty", "what was ended stays so"


def test_a_service_that_asked_for_a_key_does_not_begin_again_without(home, service, monkeypatch):
    monkeypatch.setenv("STOKER_API_KEY", "sesame-open")
    deploy(service, deployment("one"))
    saved: Any = state.read("default")
    assert saved.asks_key
    for key, expected in ((None, "failed"), (None, "failed"), ("sesame-open", "serving")):
        os.kill(Control("default").status().keeper_pid, signal.SIGKILL)
        wait(lambda: not processes_of(home))
        monkeypatch.delenv("STOKER_API_KEY", raising=False)
        if key:
            monkeypatch.setenv("STOKER_API_KEY", key)
        again = Control.start("default", saved.host, saved.port)
        found = wait_status(again, lambda status: status.state in ("failed", "serving"))
        assert found.state == expected
        if not key:
            assert "clients needed a key, STOKER_API_KEY" in found.serving.fault
            assert chat(found.url)[0] == 503
            assert not found.serving.pid


def test_a_killed_launcher_takes_all_of_its_engine_with_it(home, service):
    deploy(service, deployment("one", "--child"))
    saved: Any = state.read("default")
    (launcher,) = saved.engines
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) == 2
    os.kill(launcher.pid, signal.SIGKILL)
    found = wait_restart(service, 1)
    assert "SIGKILL" in found.serving.fault
    assert not any(each.is_running() for each in family)


def test_commands_at_once_have_one_keeper(home):
    program = (
        "from stoker.up.control import Control\nprint(Control.start('default', '127.0.0.1', 0).status().keeper_pid)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    pids = {each.communicate()[0] for each in both}
    assert len(pids) == 1
    refused = pytest.raises(StokerError, match=r"is being changed by `stoker up demo` \(pid \d+")
    with state.lock("default", "stoker up demo"), refused, state.lock("default", "stoker down"):
        pass


def test_a_port_in_use_is_refused_and_so_is_another_address(home):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StokerError, match=f"cannot listen on 127.0.0.1, port {port}"):
            Control.start("default", "127.0.0.1", port)
    found = Control.start("default", "127.0.0.1", 0)
    with pytest.raises(StokerError, match=r"listens on 127\.0\.0\.1, port"):
        Control.start("default", "127.0.0.1", port)
    assert found.status().state == "empty"


def test_all_launches_end_when_one_dies(home, service):
    both = (launch("first"), Launch((sys.executable, "-c", "import time; print('joined'); time.sleep(3600)")))
    deploy(service, deployment("first", launches=both, restarts=0))
    saved: Any = state.read("default")
    first, second = (psutil.Process(each.pid).children()[0] for each in saved.engines)
    second.kill()
    found = wait_status(service, lambda status: status.state == "failed")
    assert "SIGKILL" in found.serving.fault
    assert "[1] joined" in Path(found.serving.log).read_text()
    wait(lambda: not first.is_running())


def test_no_secret_reaches_a_file(home, service, monkeypatch):
    monkeypatch.setenv("FAKE_API_KEY", "sesame-open")
    serving = deploy(service, deployment("one"))
    assert "the key is ***" in Path(serving.log).read_text()
    os.kill(serving.pid, signal.SIGKILL)
    wait_restart(service, 1)
    assert Path(serving.log).read_text().count("the key is ***") == 2, "a restart has it too"
    files = [path for path in home.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"sesame" in path.read_bytes()]
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
