"""Runs one command and leaves nothing of it behind. It stands alone, since it is also sent to other hosts over ssh.

Standard input: a line of JSON (command, environment, folder, files, cleanup, quiet_s), then words of the keeper, each a
line: empty is a sign of life, `stop SECONDS` is SIGTERM, and SIGKILL for all descendants after that time. An end of
input means that the keeper, or ssh, is gone: `stop` with the default grace. So does silence of `quiet_s`, where a
network may break without a word. Output of the command is passed on. The exit status is the command's, 128 + N after
signal N. The first line of output tells the command's process. Python 3.8 with its standard library is all it needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

PID_LINE = "\0stoker-pid "  # the first line of output: the process that runs the command
GRACE_S = 5.0
LEFT_S = 1.0  # that descendants have to end after the command itself has
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        order: dict[str, Any] = json.loads(stdin.readline())
    remote = not order["folder"]
    folder = order["folder"] or tempfile.mkdtemp(prefix="stoker-")
    try:
        for name, text in order["files"].items():
            path = os.path.join(folder, os.path.basename(name))
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
        environment = dict(os.environ, **order["environment"])
        status = _run(order["command"], environment, folder, order["quiet_s"])
        if order["cleanup"]:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(order["cleanup"], cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=30.0)
    finally:
        if remote:
            shutil.rmtree(folder, ignore_errors=True)
    return status


def _run(command: list[str], environment: dict[str, str], folder: str, quiet_s: float | None) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process, which finds them
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    told: list[int] = []
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: told.append(number))
    try:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    print(f"{PID_LINE}{child.pid}", flush=True)
    keeper = _Keeper(quiet_s)
    kill_at: float | None = None
    while (status := _reap(child.pid)) is None:
        grace = keeper.wait(woken, None if kill_at is None else max(0.0, kill_at - time.monotonic()))
        if told and grace is None:
            grace = GRACE_S
        if grace is not None:
            told.clear()
            if kill_at is None:
                os.kill(child.pid, signal.SIGTERM)
            kill_at = min(kill_at or math.inf, time.monotonic() + grace)
        if kill_at is not None and time.monotonic() >= kill_at:
            _kill_descendants()
    until = time.monotonic() + LEFT_S
    while _descendants():
        if kill_at is not None or time.monotonic() > until:
            _kill_descendants()
        time.sleep(0.02)
        _reap(0)
    return status


class _Keeper:
    """What the keeper says on standard input."""

    def __init__(self, quiet_s: float | None) -> None:
        self._quiet_s, self._heard_at = quiet_s, time.monotonic()
        self._text, self._listening = b"", True

    def wait(self, woken: int, timeout: float | None) -> float | None:
        """Until something happens. Returns the grace that the command has left if it is to stop."""
        if timeout is None and self._quiet_s is not None:
            timeout = max(0.0, self._heard_at + self._quiet_s - time.monotonic())
        elif timeout is not None:
            timeout = max(timeout, 0.05)  # it was killed and has not ended yet
        stdin = sys.stdin.fileno()
        ready, _, _ = select.select([woken, stdin] if self._listening else [woken], [], [], timeout)
        if woken in ready:
            os.read(woken, 4096)
        grace = None
        if stdin in ready:
            read = os.read(stdin, 4096)
            self._heard_at = time.monotonic()
            self._listening = bool(read)
            *lines, self._text = (self._text + read).split(b"\n")
            for line in lines:
                if line.startswith(b"stop "):
                    grace = float(line.split()[1])
            if not read and grace is None:
                grace = GRACE_S
        elif self._quiet_s is not None and time.monotonic() - self._heard_at >= self._quiet_s:
            self._heard_at = time.monotonic()
            grace = GRACE_S
        return grace


def _reap(pid: int) -> int | None:
    """Waits for whatever has ended; the exit status of `pid` if it is among them."""
    found = None
    try:
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if not ended:
                return found
            if ended == pid:
                found = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    except ChildProcessError:
        return found


def _kill_descendants() -> None:
    for pid in _descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants() -> list[int]:
    """All processes below this one that have not ended, in whatever session or process group."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # it has ended
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found, look = [], [os.getpid()]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += below
    return found


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
