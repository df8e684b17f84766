"""How commands talk to a service's keeper: over the unix socket in its folder, as JSON."""

import contextlib
import errno
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from stoker.engines.engine import Deployment
from stoker.errors import StokerError
from stoker.up import state, systemd
from stoker.up.state import Instance, PhaseTime, Status

__all__ = ["Apply", "Control", "Instance", "PhaseTime", "Status"]

SOCKET = "control.sock"
KEEPER_LOCK = "keeper.lock"
KEEPER_LOG = "keeper.log"
START_S = 30.0  # for a keeper to answer
ANSWER_S = 60.0  # for a call: on a machine that swaps, everything takes long


class Apply(Struct, frozen=True):
    """Body of /apply. `environment` is that of the command, for the engine; the keeper holds it in memory only."""

    deployment: Deployment
    mode: Literal["beside", "swap"]
    environment: dict[str, str]


class Control:
    """The keeper of one service. Calls raise a StokerError with what the keeper says, or that it is gone."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = state.folder(name)

    @classmethod
    def start(cls, name: str, host: str, port: int, service: bool = False) -> "Control":
        """The keeper of a service, started if none runs. It brings up what was accepted before, if anything was, so
        look at `status().serving`. `service` lets systemd run it; a keeper that runs already, from the machine's next
        start on. Raises if the port is taken or the service has another address."""
        folder = state.make_folder(name)
        if found := cls.find(name):
            found._check_address(host, port)
            if service and not systemd.unit_file(name).exists():
                saved = state.read(name)
                systemd.install(name, keeper_command(folder, host, saved.port if saved else port))
            return found
        log = folder / KEEPER_LOG
        written = log.stat().st_size if log.exists() else 0
        command = keeper_command(folder, host, port)
        started = systemd.start(name, command) if service else _start(command, log)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            found = cls.find(name)
            # If another command was faster, its keeper runs; the one started here ends as soon as it sees that. It must
            # not be left behind, or it might see it only after that service has ended.
            if found and (started.ended() or started.pid in (None, found.status().keeper_pid)):
                found._check_address(host, port)
                return found
            if started.ended() and not state.is_locked(folder / KEEPER_LOCK):
                raise StokerError(_last_error(log, written) or f"the keeper did not start; {log} may say why.")
            time.sleep(0.02)
        raise StokerError(f"the keeper of service {name} did not answer within {START_S:.0f} s; {log} may say why.")

    @classmethod
    def check(cls, name: str, host: str, port: int) -> None:
        """Raises if `start` would, for the address: the port is taken, or the service has another one."""
        if found := cls.find(name):
            found._check_address(host, port)
        elif port:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                socket.create_server((host, port), family=family).close()
            except OSError as error:
                raise not_free(host, port, error) from error

    @classmethod
    def find(cls, name: str) -> "Control | None":
        """The running keeper's. One that was just killed may still accept a connection, and answers nothing."""
        found = cls(name)
        try:
            found.status()
        except StokerError as error:
            return found if isinstance(error.__cause__, TimeoutError) else None
        return found

    def status(self) -> Status:
        return msgspec.json.decode(self._call("GET", "/status"), type=Status)

    def apply(self, deployment: Deployment, mode: Literal["beside", "swap"]) -> None:
        """Makes it the candidate and returns; `status().candidate` shows how far it is. A candidate that dies, or is
        not ready in time, is `failed` with the reason, and after `swap` the old one is started again at once."""
        self._call("POST", "/apply", Apply(deployment, mode, _environment()))

    def accept(self) -> None:
        """The candidate, which must be ready, serves from now on. The old one ends its requests in the background."""
        self._call("POST", "/accept")

    def reject(self, reason: str) -> None:
        """Stops the candidate; after `swap` the old one is started again."""
        self._call("POST", "/reject", {"reason": reason})

    def stop(self, now: bool = False) -> None:
        """Drains (not with `now`), stops the engines and ends the keeper. Returns when all of it is gone."""
        found = self.status()
        draining = [found.serving, *found.draining]
        drain_s = max((each.deployment.drain_timeout_s for each in draining if each), default=0.0)
        self._call("POST", "/stop", {"now": now}, timeout=drain_s + 60.0)
        until = time.monotonic() + ANSWER_S
        while state.is_locked(self._folder / KEEPER_LOCK) and time.monotonic() < until:
            time.sleep(0.02)

    def _check_address(self, host: str, port: int) -> None:
        saved = state.read(self.name)
        if saved and (saved.host, saved.port) != (host, port) and port:
            raise StokerError(
                f"service {self.name} listens on {saved.host}, port {saved.port}, not on {host}, port {port}. "
                "Use that address, end the service with stoker down, or start another one with --name."
            )

    def _connect(self) -> socket.socket:
        """Through a descriptor of the folder, since the path of a socket may have 107 bytes only."""
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            found.settimeout(ANSWER_S)
            found.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        except OSError:
            found.close()
            raise
        finally:
            os.close(folder)
        return found

    def _call(self, method: str, path: str, body: Any = None, timeout: float = ANSWER_S) -> bytes:
        connection = http.client.HTTPConnection("keeper", timeout=timeout)
        try:
            connection.sock = self._connect()
            connection.sock.settimeout(timeout)
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, content, {"content-type": "application/json"})
            answer = connection.getresponse()
            said = answer.read()
        except TimeoutError as error:
            raise StokerError(f"the keeper of service {self.name} does not answer within {timeout:.0f} s.") from error
        except (OSError, http.client.HTTPException) as error:
            raise StokerError(f"service {self.name} has no keeper (any more): {error}.") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise StokerError(said.decode("utf-8", "replace"))
        return said


def not_free(host: str, port: int, error: OSError) -> StokerError:
    """A keeper cannot listen there."""
    others = [
        name for name in state.names() if (saved := state.read(name)) and saved.port == port and Control.find(name)
    ]
    if error.errno != errno.EADDRINUSE:
        way = "Choose another address with --host and --port."
    elif others:
        way = (
            f"Service {others[0]} listens there: end it (stoker down {others[0]}), or choose another port with --port."
        )
    else:
        way = "Stop what listens there, or choose another port with --port."
    number = error.errno or 0  # negative of a name that was not found
    why = os.strerror(number) if number > 0 else str(error.strerror).partition(" (")[0]
    return StokerError(f"the service cannot listen on {host}, port {port}: {why}. {way}")


def clean_up(name: str) -> None:
    """After a keeper that was killed: ends what it may have left, and notes that the service is stopped."""
    saved = state.read(name)
    if saved is None or saved.stopped:
        return
    for each in saved.engines:
        if each.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
    saved.stopped = True
    state.write(state.folder(name) / "service.json", saved)


def keeper_command(folder: Path, host: str, port: int) -> list[str]:
    return [sys.executable, "-m", "stoker.up.keeper", str(folder), "--host", host, "--port", str(port)]


def _environment() -> dict[str, str]:
    """Of this process, without what is not UTF-8, since it travels as JSON."""
    found = {}
    for key, value in os.environb.items():
        with contextlib.suppress(UnicodeDecodeError):
            found[key.decode()] = value.decode()
    return found


def status(name: str) -> Status | None:
    """Of a service with or without a keeper; None if there never was one."""
    if found := Control.find(name):
        return found.status()
    saved = state.read(name)
    if saved is None:
        return None
    last = saved.status
    last.keeper_pid, last.state = 0, "stopped" if saved.stopped else "gone"
    last.warnings = []
    if not saved.stopped:
        keeper = f"its keeper (pid {saved.keeper.pid})"
        last.warnings.append(f"{keeper} was killed, or the machine started anew; stoker up starts it again")
    if alive := [each.pid for each in saved.engines if each.alive]:
        last.warnings.append(f"processes of its engine are still there: {', '.join(map(str, alive))}")
    for each in (last.serving, last.candidate, *last.draining):
        if each and each.state != "failed":
            each.state, each.pid, each.phase = "stopped", 0, None
    return last


class _Started:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid: int | None = process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None


def _start(command: list[str], log: Path) -> _Started:
    """In a session of its own: it outlives the command and its terminal."""
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        return _Started(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
        )


def _last_error(log: Path, written: int) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_bytes()[written:].decode("utf-8", "replace").splitlines()
        errors = [found[1] for line in lines if (found := re.search(r"\bERROR (.*)", line))]
        return errors[-1] if errors else ""
    return ""
