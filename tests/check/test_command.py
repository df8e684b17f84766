"""The command as people run it, against a server in another process: interrupted, killed, and left alone."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from stoker.check.suites import QUICK_TOKENS, draw
from tests.check.processes import Served, check, command, environment, served

SLOW = 0.05  # seconds that the server takes for an answer


def begun(server: Served, file: Path, requests: int) -> "subprocess.Popen[str]":
    """A check that has asked so many items."""
    process = subprocess.Popen(
        command(server.url, "--suite", "agent", "--items", "60", "--json", str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(str(file.parent)),
    )
    server.wait_for(requests)
    return process


def rest(server: Served, file: Path) -> "subprocess.CompletedProcess[str]":
    return check(server.url, "--suite", "agent", "--items", "60", "--json", str(file), home=str(file.parent))


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_an_interrupted_check_goes_on_and_asks_nothing_twice(how: signal.Signals, tmp_path: Path):
    file = tmp_path / "result.json"
    with served("agent", SLOW) as server:
        process = begun(server, file, 20)
        process.send_signal(how)
        said, errors = process.communicate(timeout=30)
        kept = len((tmp_path / "result.json.partial").read_text().splitlines()) - 1
        assert 18 <= kept < 40
        if how == signal.SIGINT:
            assert process.returncode == 130
            assert "The check was interrupted: this is what had been asked." in said
            assert "The same command goes on" in errors
            assert json.loads(file.read_text())["complete"] is False
        ran = rest(server, file)
        assert f"Going on: items already in {file}.partial: {kept}" in ran.stderr.replace("\n", "")
        assert ran.returncode == 0
        server.wait_for(60)  # with the one that was being answered, 61
    found = json.loads(file.read_text())
    assert found["complete"]
    assert [asked["id"] for asked in found["answers"]] == [item.id for item in draw("agent", "1", 60)]
    assert found["suites"][0]["score"] == 1.0
    assert not (tmp_path / "result.json.partial").exists()


def test_a_server_that_dies_ends_the_check_which_says_so_and_goes_on_later(tmp_path: Path):
    file = tmp_path / "result.json"
    with served("agent", SLOW) as server:
        process = begun(server, file, 20)
        server.process.kill()
        said, errors = process.communicate(timeout=60)
        assert process.returncode == 1, errors
        found = json.loads(file.read_text())
        failed = found["failed"]
        assert 8 <= failed <= 9
        assert f"{failed} of {len(found['answers'])} requests to A failed and are in no score." in said.replace(
            "\n", " "
        )
        assert "the last 8 requests to server A all failed: connection: no connection to" in said
        assert not found["complete"]
        port = server.url.rpartition(":")[2]
    with served("agent", SLOW, port=int(port)) as again:
        ran = rest(again, file)
        assert ran.returncode == 0, ran.stderr
    found = json.loads(file.read_text())
    assert found["complete"]
    assert found["failed"] == 0, "failed items are asked again"
    assert len(found["answers"]) == 60


def test_a_terminal_shows_how_far_it_is_and_the_time_that_is_left(tmp_path: Path):
    with served("agent", SLOW) as server:
        mine, theirs = pty.openpty()
        process = subprocess.Popen(
            command(server.url, "--suite", "agent", "--items", "40"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment(str(tmp_path)), "TERM": "xterm", "COLUMNS": "100"},
            close_fds=True,
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(mine, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            shown += piece
        os.close(mine)
        assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    shares = [int(share) for share in re.findall(r"(\d+)%[^%]*?left", text)]
    assert shares == sorted(shares)
    assert len(set(shares)) > 5
    left = re.findall(r"left (\d+:\d\d:\d\d|-:--:--)", text)
    assert re.search("0:00:0[1-9]", " ".join(left)), "two seconds of work are left at the start"


def test_elsewhere_every_tenth_is_a_line_with_the_time_that_is_left(tmp_path: Path):
    with served("agent", SLOW) as server:
        ran = check(server.url, "--suite", "agent", "--items", "40", home=str(tmp_path))
    lines = re.findall(r"(\d+)%: (\d+) items; about (\d+) s left", ran.stderr)
    assert 8 <= len(lines) <= 10
    assert int(lines[0][2]) >= int(lines[-1][2]) == 0
    assert lines[-1][:2] == ("100", "40")


def test_quick_draws_from_larger_pools_what_27000_tokens_allow_and_counts_them(tmp_path: Path):
    items = draw("quick", "1")
    assert 0.8 * QUICK_TOKENS < sum(item.cost for item in items) <= QUICK_TOKENS == 27_000
    assert len(items) < len(draw("full", "1"))
    file = tmp_path / "result.json"
    began = time.monotonic()
    with served("quick") as server:
        ran = check(server.url, "--json", str(file), "--concurrency", "4", home=str(tmp_path))
    found = json.loads(file.read_text())
    assert found["complete"], ran.stderr
    assert found["thinking"] == "off"
    assert len(found["answers"]) == len(items)
    assert found["output_tokens"]["A"] == sum(each["replies"]["A"]["reply"]["tokens"] for each in found["answers"])
    assert found["output_tokens"]["A"] < QUICK_TOKENS
    assert time.monotonic() - began < 100


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"STOKER_API_KEY": "ours", "OPENAI_API_KEY": "other"}, "Bearer ours"),
        ({"OPENAI_API_KEY": "other"}, "Bearer other"),
    ],
)
def test_the_key_is_taken_from_the_name_that_the_server_takes_it_from(given: dict[str, str], sent: str, tmp_path: Path):
    seen: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("authorization"))
            self.send_error(401)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        line = command(f"http://127.0.0.1:{server.server_port}", "--suite", "agent", "--items", "1")
        ran = subprocess.run(line, env={**environment(str(tmp_path)), **given}, capture_output=True, timeout=60)
        server.shutdown()
    assert ran.returncode != 0
    assert set(seen) == {sent}
