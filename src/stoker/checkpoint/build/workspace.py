"""OUT.partial: where a build is written, how it resumes after a kill, and how it becomes OUT in one rename.

    OUT.partial/state.json   the options, the sources as they were, the files that are done and their hashes
    OUT.partial/result/      what becomes OUT; its config.json is written last, so nothing loads it before
    OUT.partial/fetched/     tensors fetched from a hub

A result is taken over only whole: until the rename there is no OUT.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stoker.errors import StokerError
from stoker.weights.json_file import read_json

STATE = "state.json"
LOCK = "lock"


class WorkspaceError(StokerError):
    """An output directory that is in use, or an unfinished one that belongs to another build."""


class Workspace:
    def __init__(self, out: Path, force: bool) -> None:
        self.out, self.force = out, force
        self.partial = out.with_name(out.name + ".partial")
        self.result = self.partial / "result"
        self.fetched = self.partial / "fetched"
        self.replaced = out.with_name(out.name + ".replaced")
        self.done: dict[str, str] = {}  # file -> sha256
        self._state: dict[str, Any] = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one build in at a time. The kernel releases the lock when the process ends, however it ends."""
        fresh = not self.partial.exists()
        self.partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.partial / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise WorkspaceError(f"another stoker build is writing {self.partial}; wait for it to end.") from None
            yield
        finally:
            if fresh and {path.name for path in self.partial.glob("*")} <= {LOCK}:  # failed before it began
                shutil.rmtree(self.partial, ignore_errors=True)
            os.close(descriptor)

    def check_out(self) -> None:
        """OUT must not exist or, with --force, must be an earlier build."""
        if not self.out.exists():
            return
        if not self.force:
            raise WorkspaceError(f"{self.out} exists already; choose another --out, or replace it with --force.")
        if not (self.out / "stoker.json").is_file():
            raise WorkspaceError(
                f"{self.out} holds no stoker.json, so stoker build did not make it, and --force replaces nothing else; "
                "choose another --out or remove it yourself."
            )

    def finished(self, options: Mapping[str, Any]) -> bool:
        """Whether a run with these options was killed between making OUT and cleaning up; if so, cleans up."""
        if not self.out.exists() or not self.partial.exists() or self.result.exists():
            return False
        record = self.partial / STATE
        if not record.exists():  # only an empty directory is left
            record = self.out / "stoker.json"
        if (self.force and record.parent == self.out) or not record.exists():
            return False
        same = read_json(record)["recipe"] == options
        self.tidy()
        return bool(same)

    def begin(self, state: Mapping[str, Any]) -> bool:
        """Resume an earlier build of the same state, or start one; True if there is one to resume."""
        path = self.partial / STATE
        self._state = json.loads(json.dumps(state))  # as it will be read back
        if path.exists():
            earlier = read_json(path)
            self.done = earlier.pop("done")
            self._compare(earlier)
            self.result.mkdir(exist_ok=True)
            return True
        if self.result.exists():
            raise WorkspaceError(f"{self.partial} has no {STATE}, so stoker build did not make it; remove it.")
        self.result.mkdir()
        self._save()
        return False

    def record(self, file: str, digest: str) -> None:
        """Only for files that are complete and flushed: a resumed build does not look at them again."""
        self.done[file] = digest
        self._save()

    def _save(self) -> None:
        write_synced(self.partial / STATE, json.dumps({**self._state, "done": self.done}, indent=1).encode())

    def _compare(self, earlier: Mapping[str, Any]) -> None:
        over = f"Remove {self.partial} to start over."
        command = earlier.get("command")
        for option, was in earlier["recipe"].items():
            now = self._state["recipe"].get(option)
            if now != was:
                name = f"--{option.replace('_', '-')}"
                raise WorkspaceError(
                    f"{self.partial} belongs to another build: {name} was {was!r} there and is {now!r} now. "
                    f"Repeat that command to finish it ({command} --out {self.out}). {over}"
                )
        for before, now in zip(earlier["sources"], self._state["sources"], strict=True):
            _compare_source(before, now, over)
        if earlier["versions"] != self._state["versions"]:
            raise WorkspaceError(
                f"{self.partial} was begun with {_shown(earlier['versions'])}, this is "
                f"{_shown(self._state['versions'])}, whose bytes may differ. {over}"
            )
        if earlier != self._state:
            raise WorkspaceError(f"{self.partial} was laid out differently from what this build would do. {over}")

    def publish(self) -> None:
        """Flush `result` to the disk, then make it OUT by one rename."""
        sync_tree(self.result)
        if self.out.exists():  # --force, as check_out has found
            if self.replaced.exists():
                shutil.rmtree(self.replaced)
            self.out.rename(self.replaced)
        self.result.rename(self.out)
        sync_directory(self.out.parent)
        self.tidy()

    def tidy(self) -> None:
        """Removes the state last: as long as it exists, the next run knows that it describes OUT."""
        shutil.rmtree(self.fetched, ignore_errors=True)
        shutil.rmtree(self.replaced, ignore_errors=True)
        (self.partial / LOCK).unlink(missing_ok=True)
        (self.partial / STATE).unlink(missing_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)


def _compare_source(before: Mapping[str, Any], now: Mapping[str, Any], over: str) -> None:
    if before == now:
        return
    where = before.get("path") or before.get("repository")
    files, others = before.get("files", {}), now.get("files", {})
    for name in sorted({*files, *others}):
        if files.get(name) != others.get(name):
            was, size = files.get(name, {}).get("bytes", "absent"), others.get(name, {}).get("bytes", "absent")
            change = f"bytes: {was} then, {size} now" if was != size else "another time of modification"
            raise WorkspaceError(f"{where}/{name} changed since this build was begun ({change}). {over}")
    raise WorkspaceError(f"{before['option']} {where} changed since this build was begun. {over}")


def _shown(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def write_synced(path: Path, data: bytes) -> None:
    """Replace a file atomically; it is on the disk when this returns."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        sync_directory(folder)
