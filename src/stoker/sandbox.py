"""Runs functions on untrusted input in child processes, so that a hang, a crash or an out-of-memory costs one call.

`python -m stoker.sandbox FD MEMORY MODULE` is the child. It is reused from call to call and keeps nothing of one call
but what the function itself caches. Arguments are pickled; results return as JSON, so that the caller need not trust
a child.
"""

import contextlib
import json
import math
import os
import pickle
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from stoker.errors import StokerError

START_S = 60.0  # for a child to start and import what it will run, neither of which counts towards a call
NICE = 5  # children yield the processor to the server, which has other clients
GROWTH = 64 * 2**20  # bytes that a child may grow by since its first call and still be reused


class SandboxError(StokerError):
    """A call that ended without a result."""


class TimeLimit(SandboxError):
    """The call took longer than its caller allowed; the child was killed."""


class MemoryLimit(SandboxError):
    """The call needed more memory than the sandbox allows."""


class Crashed(SandboxError):
    """The child died: a library crashed, or it was killed from outside."""


class Busy(SandboxError):
    """All children are busy, and none became free in time."""


class Failed(SandboxError):
    """The function raised. `kind` is the exception's name, the message its text."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Sandbox:
    """Up to `processes` children, each with `memory` bytes in addition to Python's own. Thread-safe."""

    def __init__(self, processes: int = 1, memory: int = 512 * 2**20) -> None:
        self._memory = memory
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()  # last used first; None: not started yet
        for _ in range(processes):
            self._free.put(None)
        self._lock = threading.Lock()
        self._busy: set[_Child] = set()
        self._closed = False

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float, wait: float = 30.0) -> Any:
        """Calls a module-level function in a child. `wait` limits the wait for a free child, `timeout` the call.

        Raises a SandboxError; exceptions of the function are raised as Failed.
        """
        try:
            child = self._free.get(timeout=wait)
        except queue.Empty:
            raise Busy(f"all workers were busy for {wait:g} s. Try again later.") from None
        try:
            child = child if child is not None and child.alive() else _Child(self._memory, function.__module__)
            with self._lock:
                if self._closed:
                    child.kill()
                    raise Crashed("the sandbox is closed.")
                self._busy.add(child)
            try:
                return child.call(function, arguments, timeout)
            finally:
                with self._lock:
                    self._busy.discard(child)
                    if self._closed:
                        child.kill()
        finally:
            self._free.put(child if child is not None and child.alive() else None)

    def close(self) -> None:
        """Kills all children, busy or not."""
        with self._lock:
            self._closed = True
            children = list(self._busy)
        with contextlib.suppress(queue.Empty):
            while True:
                if child := self._free.get_nowait():
                    children.append(child)
        for child in children:
            child.kill()


class _Child:
    def __init__(self, memory: int, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stoker.sandbox", str(theirs.fileno()), str(memory), module],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._connection = Connection(ours.detach())
        self._started = False

    def alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> Any:
        try:
            answer = self._answer(function, arguments, timeout)
        except BaseException as error:
            self.kill()
            self._connection.close()
            if isinstance(error, EOFError | OSError):
                raise Crashed("the work ended its process, most likely because a library crashed.") from error
            raise
        if answer.get("retire"):
            self.kill()
            self._connection.close()
        if answer.get("memory"):
            raise MemoryLimit("the work needs more memory than it may take.")
        if kind := answer.get("failed"):
            raise Failed(str(kind), str(answer["message"]))
        return answer["result"]

    def _answer(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float) -> dict[str, Any]:
        if not self._started:
            if not self._connection.poll(START_S):
                raise Crashed(f"a worker did not start within {START_S:g} s.")
            self._connection.recv_bytes(0)
            self._started = True
        end = time.monotonic() + timeout
        question = pickle.dumps((function.__module__, function.__qualname__, timeout, arguments))
        self._connection.send_bytes(question)
        if not self._connection.poll(max(0.0, end - time.monotonic())):
            raise TimeLimit(f"the work took more than the {timeout:g} s that it may take.")
        answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return answer


# -- in the child


def main(fd: str, memory: str, module: str) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the parent too, which decides
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    connection = Connection(int(fd))
    import_module(module)  # trusted, so it comes before any limit
    before = _memory()[1]
    _limit_memory(int(memory))
    try:
        connection.send_bytes(b"")
        while True:
            module, name, timeout, arguments = pickle.loads(connection.recv_bytes())
            signal.alarm(math.ceil(timeout) + 5)  # in case the parent dies and cannot kill it
            function = getattr(import_module(module), name)
            answer = _run(function, arguments)
            del arguments
            if _memory()[1] - before > GROWTH:
                answer["retire"] = True
            connection.send_bytes(_encoded(answer))
            signal.alarm(0)
    except (EOFError, OSError):  # the parent died or closed the connection
        pass
    os._exit(0)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return {"result": function(*arguments)}
    except MemoryError:
        return {"memory": True, "retire": True}
    except RecursionError:
        return {"failed": "RecursionError", "message": "it is nested too deeply."}
    except Exception as error:
        return {"failed": type(error).__name__, "message": str(error)[:10_000]}


def _encoded(answer: dict[str, Any]) -> bytes:
    try:
        return json.dumps(answer).encode()
    except MemoryError:
        answer = {"memory": True, "retire": True}
    except (TypeError, ValueError, RecursionError) as error:
        answer = {"failed": type(error).__name__, "message": f"its result is no JSON: {error}"}
    return json.dumps(answer).encode()


def _limit_memory(beside: int) -> None:
    if sys.platform == "linux":  # elsewhere the limit is not enforced, or is counted differently
        most = _memory()[0] + beside
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _memory() -> tuple[int, int]:
    """Bytes of the address space, and of resident memory."""
    if sys.platform != "linux":
        return 0, 0
    with open("/proc/self/statm", encoding="ascii") as statm:
        space, held = (int(pages) * resource.getpagesize() for pages in statm.read().split()[:2])
    return space, held


if __name__ == "__main__":
    main(*sys.argv[1:])
