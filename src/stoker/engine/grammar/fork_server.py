"""The parent's side of grammar workers: a fork server that is started when first needed, and its children."""

import json
import os
import socket
import subprocess
import sys
import threading
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stoker.errors import RequestError


class Crashed(RequestError):
    """A worker died: it was killed, ran out of memory, or the library crashed."""

    def __init__(self) -> None:
        super().__init__(
            "the grammar needs more memory than it may take, or it makes the grammar library crash. Simplify it."
        )


class ForkServer:
    """Thread-safe. The fork server ends with this process, however that ends, because it sees its socket close."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._arguments = [str(tokenizer_file), str(vocab_size), *map(str, ends)]
        self._lock = threading.RLock()  # the garbage collector may kill a child at any time
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._next = 0

    def start(self) -> None:
        """Starts the fork server without waiting for it, so that the first child is there sooner."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._begin()

    def fork(self) -> "Child":
        """Starts a child. Raises RequestError if the system has no process or file descriptor left."""
        try:
            with self._lock:
                return self._fork()
        except OSError as error:
            raise RequestError(f"no process could be started for the grammar: {error}. Try again later.") from error

    def _fork(self) -> "Child":
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._next += 1
            self.start()
            try:
                self._command(b"F", self._next, theirs)
            except OSError:  # it has just died
                self._end()
                self.start()
                self._command(b"F", self._next, theirs)
            return Child(self, self._next, Connection(os.dup(ours.fileno())))

    def kill(self, number: int) -> None:
        """Kills a child; does nothing if it has already ended."""
        with self._lock:
            try:
                self._command(b"K", number)
            except OSError:  # the fork server is gone, and its children with it
                self._end()

    def _command(self, kind: bytes, number: int, attached: socket.socket | None = None) -> None:
        if self._control is None:
            return
        message = kind + number.to_bytes(4, "little")
        socket.send_fds(self._control, [message], [attached.fileno()] if attached else [])

    def _begin(self) -> None:
        self._end()
        control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "stoker.engine.grammar.worker", str(theirs.fileno()), *self._arguments]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._control = control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Child:
    """A worker process with one grammar, or none yet."""

    def __init__(self, server: ForkServer, number: int, connection: Connection) -> None:
        self._server, self._number, self.connection = server, number, connection

    def receive(self, longest: int) -> tuple[dict[str, Any], bytes] | None:
        """The next message, or None for its greeting. Blocks until there is one. Raises Crashed."""
        try:
            message = self.connection.recv_bytes(longest)
        except (EOFError, OSError) as error:
            raise Crashed from error
        if not message:
            return None
        head, _, masks = message.partition(b"\n")
        found: dict[str, Any] = json.loads(head)
        return found, masks

    def send(self, message: bytes) -> None:
        """Sends a message. Only for a child that is reading: otherwise this would block."""
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise Crashed from error

    def kill(self) -> None:
        if not self.connection.closed:
            self.connection.close()
            self._server.kill(self._number)

    __del__ = kill


@cache
def fork_server(tokenizer_file: Path, vocab_size: int, ends: tuple[int, ...]) -> ForkServer:
    return ForkServer(tokenizer_file, vocab_size, ends)
