"""Runs generated functions in a process of their own (code_jail.py): no files, no network, no other processes, limits
on time, memory and output. Works without root, on Linux; elsewhere code items are left out."""

import contextlib
import json
import os
import platform
import select
import signal
import subprocess
import sys
import time
from functools import cache
from typing import Any

from msgspec import Struct

from stoker.check import code_jail

SECONDS = 8
MEMORY = 512 * 2**20
OUTPUT = 2**20  # bytes that are read of what it says


class Ran(Struct):
    """A result per case: {"value": …} or {"error": …}. `failure` if the program as a whole could not be run."""

    results: list[dict[str, Any]] = []
    failure: str = ""


@cache
def unavailable() -> str:
    """Why code cannot be confined here, or nothing."""
    if sys.platform != "linux" or platform.machine() not in code_jail.NUMBERS:
        return (
            f"code is confined on Linux on x86_64 and aarch64 only, and this is {sys.platform} on {platform.machine()}"
        )
    ran = run_cases("def one():\n    return 1\n", "one", [[]])
    return "" if ran.results == [{"value": 1}] else f"the sandbox does not start here: {ran.failure}"


def run_cases(
    program: str,
    function: str,
    inputs: list[list[Any]],
    seconds: int = SECONDS,
    memory: int = MEMORY,
    modules: tuple[str, ...] = (),
) -> Ran:
    """Calls the function once per input. Cases that were not reached say why."""
    job = {"program": program, "function": function, "inputs": inputs, "seconds": seconds, "memory": memory}
    end = time.monotonic() + seconds
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", code_jail.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PYTHONHASHSEED": "0"},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps({**job, "modules": list(modules)}).encode())
        said, stopped = _read(process.stdout.fileno(), end)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        status = process.wait()
    return _ran(said, stopped or _died(status, seconds), len(inputs))


def _read(pipe: int, end: float) -> tuple[bytes, str]:
    said = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
        if not ready:
            return said, "took too long"
        piece = os.read(pipe, 65_536)
        if not piece:
            return said, ""
        said += piece
        if len(said) > OUTPUT:
            return said, f"gave more than {OUTPUT:,} bytes"


def _died(status: int, seconds: int) -> str:
    if status == code_jail.UNCONFINED:
        return "the kernel has no seccomp"
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"took more than {seconds} s or was killed"
    return f"the process ended with status {status}" if status else "ended early"


def _ran(said: bytes, why: str, cases: int) -> Ran:
    found: list[dict[str, Any]] = []
    for line in said.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            result = json.loads(line)
            if isinstance(result, dict):
                if "failure" in result:
                    return Ran(failure=str(result["failure"]))
                found.append(result)
    if not found and cases:
        return Ran(failure=why)
    return Ran((found + [{"error": why}] * cases)[:cases])
