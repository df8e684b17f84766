"""A service on disk: its folder, the lock of commands that change it, and service.json. Nothing secret is in it."""

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec
import psutil
from msgspec import Struct

from stoker.engines.engine import Deployment, Phase
from stoker.errors import StokerError

HOME = "STOKER_STATE_HOME"  # environment: where services are kept, in place of the user's state directory
DEFAULT = "default"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_VERSION = 1


class PhaseTime(Struct, frozen=True):
    """A phase of a start that is over, and how long it took."""

    name: str
    seconds: float


class Process(Struct, frozen=True):
    """A process that is not mistaken for a later one with the same number."""

    pid: int
    created: float  # as psutil gives it

    @classmethod
    def of(cls, pid: int) -> "Process":
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.Error:
            return cls(pid, 0.0)

    @property
    def alive(self) -> bool:
        try:
            found = psutil.Process(self.pid)
            return abs(found.create_time() - self.created) < 1.0 and found.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class Instance(Struct):
    """One engine of a service, through all its restarts."""

    deployment: Deployment
    address: str = ""  # where the keeper, and the smoke test, reach it: http://127.0.0.1:PORT
    state: Literal["starting", "ready", "draining", "restarting", "failed", "stopped"] = "starting"
    phase: Phase | None = None  # while it starts
    phases: list[PhaseTime] = []  # of the latest start
    pid: int = 0  # of the process that answers requests, on its host
    started_at: float = 0.0  # seconds since 1970; the latest start
    ready_s: float = 0.0  # that the latest start took; 0 until it is ready
    restarts: int = 0  # since it was accepted, by the keeper and by the engine itself
    fault: str = ""  # why it was restarted or has failed, latest
    log: str = ""  # file


class Status(Struct):
    """What `stoker status --json` prints, and what `Control.status` returns."""

    name: str
    url: str
    keeper_pid: int
    serving: Instance | None = None  # the accepted one
    candidate: Instance | None = None
    draining: list[Instance] = []  # replaced; they end the requests they have begun
    # The last two are of a service without a keeper: stopped by a command, or gone, which nobody asked for.
    state: Literal["empty", "starting", "serving", "restarting", "failed", "switching", "stopped", "gone"] = "empty"
    warnings: list[str] = []


class Service(Struct):
    """service.json: enough to show a service whose keeper is gone, and to bring it up again."""

    host: str
    port: int
    keeper: Process
    status: Status
    engines: list[Process] = []
    logs: int = 0  # of instances, numbered
    stopped: bool = False  # by `stoker down`
    asks_key: bool = False  # of clients: the accepted engine had one in its environment, which is not kept
    version: int = _VERSION


def home() -> Path:
    if named := os.environ.get(HOME):
        return Path(named).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base).absolute() / "stoker"


def folder(name: str) -> Path:
    if not _NAME.match(name):
        raise StokerError(
            f"{name!r} cannot name a service: use up to 64 of a-z, 0-9, '.', '_' and '-', with a letter or digit first."
        )
    return home() / "services" / name


def make_folder(name: str) -> Path:
    """The folder of a service, for its user alone."""
    path = folder(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for each in (path, path.parent):
            each.chmod(0o700)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def names() -> list[str]:
    """Of all services that were ever started here."""
    return sorted(path.parent.name for path in (home() / "services").glob("*/service.json"))


def read(name: str) -> Service | None:
    """None if there is no such service."""
    return read_file(folder(name) / "service.json")


def read_file(path: Path) -> Service | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Service)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StokerError(f"{path} cannot be read: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise StokerError(
            f"{path} is damaged, or of another version of Stoker ({error}). Remove it if the service is to begin anew."
        ) from error


def write(path: Path, service: Service | msgspec.Raw) -> None:
    """service.json, which must be whole after a loss of power."""
    write_private(path, service, sync=True)


def write_private(path: Path, data: Any, sync: bool = False) -> None:
    """As JSON, for this user alone, replaced at once: a reader sees the old or the new file. Raises StokerError."""
    new = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with FileIO(descriptor, "wb") as file:  # unbuffered, so that closing it after an error writes nothing
            left = memoryview(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
            while left:
                left = left[file.write(left) :]
            if sync:
                os.fsync(descriptor)
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> StokerError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"Make room there and run the same command again, or set {HOME} to a folder on another disk."
    else:
        advice = f"Set {HOME} to a folder of yours."
    return StokerError(f"{path} cannot be written: {error.strerror}. {advice}")


@contextlib.contextmanager
def lock(name: str, command: str) -> Iterator[None]:
    """Held by a command while it changes a service. Raises, with who holds it, instead of waiting.

    The kernel frees it when its holder ends, however it ends, so that a killed command is no obstacle.
    """
    with lock_file(make_folder(name) / "lock", command) as holder:
        if holder is not None:
            raise StokerError(f"service {name} is being changed by {holder}. Wait for it to end, or stop it.")
        yield


@contextlib.contextmanager
def lock_file(path: Path, command: str, patience_s: float = 0.0) -> Iterator[str | None]:
    """Yields None if the lock was free and is held now, otherwise who holds it."""
    until = time.monotonic() + patience_s
    try:
        file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        while not _try_lock(file):
            if time.monotonic() >= until:
                yield _holder(file.read())
                return
            time.sleep(0.02)
        said = json.dumps({"pid": os.getpid(), "command": command, "since": time.time()})
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(file.fileno(), 0)
            os.pwrite(file.fileno(), said.encode(), 0)
        yield None


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock."""
    try:
        file = path.open("r+", encoding="utf-8")
    except OSError:
        return False
    with file:
        return not _try_lock(file)


def _holder(text: str) -> str:
    try:
        found = json.loads(text)
        since = datetime.fromtimestamp(found["since"]).strftime("%H:%M:%S")
        return f"`{found['command']}` (pid {found['pid']}, since {since})"
    except (ValueError, KeyError, TypeError):  # it has not written yet
        return "another command"
