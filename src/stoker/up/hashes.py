"""Files compared with their checksums, and the results remembered: hundreds of gigabytes are read once, not at every
start. A file whose size, modification time and inode are as they were is taken to be the same.
"""

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.checkpoint.inspect.checksums import Checksum
from stoker.errors import StokerError
from stoker.weights.json_file import open_file, read_json

BLOCK = 4 << 20  # bytes read at a time


class Hashes:
    """Thread-safe. Several processes may use one file: what one of them forgets is only read again."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file or _default()
        self._lock = threading.Lock()

    def match(self, path: Path, wanted: Checksum, seen: Callable[[int], None] = lambda count: None) -> bool:
        """Whether the file has that checksum. `seen` is told of bytes as they are read."""
        path = path.resolve()
        known = self._read().get(str(path), {})
        if _identity(path) == known.get("identity") and wanted.kind in known:
            seen(path.stat().st_size)
            return bool(known[wanted.kind] == wanted.digest)
        before = _identity(path)
        hasher = wanted.start(path.stat().st_size)
        for block in blocks(path):
            hasher.update(block)
            seen(len(block))
        found = hasher.hexdigest()
        if before == _identity(path):
            self._keep(path, wanted.kind, found)
        return found == wanted.digest

    def remember(self, path: Path, known: Checksum) -> None:
        """For a file whose checksum was computed while it was written."""
        self._keep(path.resolve(), known.kind, known.digest)

    def _keep(self, path: Path, kind: str, digest: str) -> None:
        identity = _identity(path)
        with self._lock, self._locked():
            entries = {name: entry for name, entry in self._read().items() if os.path.exists(name)}
            old = entries.get(str(path), {})
            entries[str(path)] = {
                **(old if old.get("identity") == identity else {}),
                "identity": identity,
                kind: digest,
            }
            new = self._file.with_name(f"{self._file.name}.new")
            with contextlib.suppress(OSError):  # of a full disk, say: then it is read again next time
                new.write_text(json.dumps(entries, indent=1), encoding="utf-8")
                new.replace(self._file)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, StokerError):
            return {name: entry for name, entry in read_json(self._file).items() if isinstance(entry, dict)}
        return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file.with_name(f"{self._file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # a home that cannot be written to
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def blocks(path: Path, stop: int | None = None) -> Iterator[memoryview]:
    """A file's bytes, up to `stop`. They do not stay in the page cache, which would push out everything else."""
    memory, position = bytearray(BLOCK), 0
    with open_file(path) as file:
        while stop is None or position < stop:
            most = BLOCK if stop is None else min(BLOCK, stop - position)
            count = file.readinto(memoryview(memory)[:most])
            if not count:
                return
            forget(file.fileno(), position, count)
            position += count
            yield memoryview(memory)[:count]


def forget(descriptor: int, start: int, length: int) -> None:
    """Drops pages of a file, as far as they are written, from the page cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stoker" / "hashes.json"
