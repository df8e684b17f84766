"""Services of `stoker up` for tests: keepers that look often, and engines that start in a tenth of a second."""

import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from stoker.engines.engine import PORT, Deployment, Launch
from stoker.up import state
from stoker.up.control import Control

ENGINE = Path(__file__).with_name("fake_engine.py")
PATIENCE_S = 60.0  # for a loaded machine
# What takes seconds in earnest takes tenths here.
TIMING = {"poll_s": 0.05, "backoff_s": 0.05, "longest_backoff_s": 0.1, "grace_s": 1.0}


@contextmanager
def state_home(path: Path, **timing: float) -> Iterator[None]:
    """Services are kept below `path`; none is left running at the end."""
    changed = {state.HOME: str(path), "STOKER_WATCH": json.dumps(TIMING | timing)}
    before = {key: os.environ.get(key) for key in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in state.names():
            if found := Control.find(name):
                keeper = state.read(name)
                try:
                    found.stop(now=True)
                except Exception:  # it hangs, and the test has failed already
                    assert keeper
                    os.kill(keeper.keeper.pid, signal.SIGKILL)
                    raise
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def launch(name: str, *options: str, **changes: Any) -> Launch:
    return Launch((sys.executable, "-I", "-S", str(ENGINE), PORT, "--name", name, *options), **changes)


def deployment(name: str, *options: str, **changes: Any) -> Deployment:
    """An engine that says `name` in all its answers."""
    settings: dict[str, Any] = {
        "launches": (launch(name, *options),),
        "drain_timeout_s": 20.0,
        "stall_s": 1.0,
    } | changes
    return Deployment(recipe=name, recipe_hash=f"hash of {name}", engine="stoker", model_name=name, **settings)


def wait(condition: Callable[[], Any]) -> Any:
    """Until it is true."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{condition} never came true")


def wait_status(control: Control, condition: Callable[[Any], Any]) -> Any:
    """A Status, once it is as wanted."""
    until = time.monotonic() + PATIENCE_S
    while not condition(found := control.status()):
        assert time.monotonic() < until, f"it never came to that: {found}"
        time.sleep(0.02)
    return found


def deploy(control: Control, wanted: Deployment, mode: Any = "beside") -> Any:
    """Until it serves."""
    control.apply(wanted, mode)
    found = wait_status(
        control, lambda status: status.candidate is None or status.candidate.state in ("ready", "failed")
    )
    assert found.candidate
    assert found.candidate.state == "ready", found.candidate.fault
    control.accept()
    serving = control.status().serving
    assert serving
    return serving


def ask(url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> tuple[int, bytes, Any]:
    """Status, body and headers."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers or {}), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def chat(url: str, **body: Any) -> tuple[int, bytes, Any]:
    return ask(f"{url}/v1/chat/completions", {"messages": []} | body)


def processes_of(home: Path) -> list[psutil.Process]:
    """Keepers, launchers and engines of services below `home`, by what they were started with."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.environ().get(state.HOME) == str(home) and process.pid != os.getpid()
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Clients:
    """Threads that ask for answers without a pause. Of each answer: its status, whether it may be retried, its text."""

    def __init__(self, url: str, count: int = 2, **body: Any) -> None:
        self.seen: list[tuple[int, bool, str]] = []
        self.errors: list[Exception] = []
        self._url, self._body, self._end = url, body, threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                status, body, headers = chat(self._url, **self._body)
            except Exception as error:
                self.errors.append(error)
                return
            text = json.loads(body)["choices"][0]["message"]["content"] if status == 200 else ""
            self.seen.append((status, "retry-after" in headers, text))
            time.sleep(0.01)
