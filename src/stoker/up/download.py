"""The files of a repository at one commit into the hub's cache: several at a time, each going on where it stopped, each
verified before it gets its name.

huggingface_hub fetches small files and links blobs into snapshots. Large files are fetched here, since huggingface_hub
(1.31 to 2.4) throws away what it has of a file when a download ends early: gigabytes of a shard.
"""

import contextlib
import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Literal

from huggingface_hub.utils import logging as hub_logging

from stoker.checkpoint.inspect.checksums import DIGEST, Checksum
from stoker.up.fetch import REPORT_S, FetchError, FetchProgress
from stoker.up.hashes import Hashes, blocks, forget
from stoker.up.hub_cache import COMMIT, HubCache
from stoker.weights.hub import Hub, HubError, ListedFile

STREAMS = 4  # files at a time
SYNC = 64 << 20  # bytes after which what arrived is flushed to the disk
SPARE = 1 << 30  # bytes of the disk that stay free
STOP_S = 2.0


class _Stopped(Exception):
    """Another file failed, or the user gave up."""


class Download:
    """`hub.sleep` is replaced, so that waiting is told, and ends with the fetch."""

    def __init__(
        self, hub: Hub, cache: HubCache, sha256: Mapping[str, str], progress: Callable[[FetchProgress], None]
    ) -> None:
        self.hub, self._cache, self._sha256, self._progress = hub, cache, sha256, progress
        self.found_out = ""  # what a user should know
        self._hashes = Hashes()
        self._stop = threading.Event()
        self._done: dict[str, int] = {}  # bytes per file
        self._total = self._to_fetch = 0
        self._notes: dict[int, str] = {}  # by thread
        self._writing: dict[str, threading.Lock] = {}  # by hash
        hub.sleep = self._wait
        hub_logging.set_verbosity_error()  # its lines about attempts would tear the progress bar

    def listing(self) -> dict[str, ListedFile]:
        """The repository's files at the commit that its revision stands at now."""
        self._progress(FetchProgress("listing"))
        listed = {file.name: file for file in self.hub.files()}
        if not COMMIT.fullmatch(self.hub.revision):
            raise HubError(f"{self.hub.repository} stands at {self.hub.revision!r}, which is no commit.")
        for file in listed.values():
            if file.name.startswith("/") or ".." in file.name.split("/"):
                raise HubError(f"{self.hub.repository} has a file {file.name!r}, which lies outside of it.")
            if file.sha256 and not DIGEST.fullmatch(file.sha256):
                raise HubError(f"{self.hub.repository}/{file.name} has a hash that is none: {file.sha256!r}.")
        return listed

    def run(self, files: Sequence[ListedFile]) -> Path:
        """Returns the snapshot, in which all the files are."""
        self._check_hashes(files)
        self._check_disk(files)
        self._total = sum(file.size for file in files)
        self._writing = {file.sha256: threading.Lock() for file in files}
        self._in_parallel(sorted(files, key=lambda file: file.size))
        return self._cache.snapshot(self.hub.revision)

    def _check_hashes(self, files: Sequence[ListedFile]) -> None:
        """Before anything is fetched: what the recipe expects and what the hub lists."""
        for file in files:
            expected = self._sha256.get(file.name)
            if expected and file.sha256 and expected != file.sha256:
                raise FetchError(
                    f"{self._what(file)} at {self.hub.revision} has the sha256 {file.sha256}, and the recipe states "
                    f"{expected}: it is another file. Name the revision that the recipe was written for."
                )

    def _check_disk(self, files: Sequence[ListedFile]) -> None:
        for file in files:
            self._done[file.name] = 0
            if self._place(file) is None:
                begun = _size(self._cache.unfinished(file.sha256)) if file.sha256 else 0
                self._done[file.name] = min(begun, file.size)
                self._to_fetch += file.size - self._done[file.name]
        free = free_bytes(self._cache.storage)
        missing = self._to_fetch + SPARE - free
        if self._to_fetch and missing > 0:
            raise FetchError(
                f"{self.hub.repository} needs {gigabytes(self._to_fetch)} more in {self._cache.storage}, where "
                f"{gigabytes(free)} are free and {gigabytes(SPARE)} must stay free: {gigabytes(missing)} are missing. "
                "Make room, or set HF_HOME to a folder on a larger disk."
            )

    def _place(self, file: ListedFile) -> Path | None:
        """Where its content is, verified or not."""
        for path in (self._path(file), self._cache.blob(file.sha256) if file.sha256 else None):
            if path and path.exists():
                return path
        return None

    def _in_parallel(self, files: Sequence[ListedFile]) -> None:
        """Threads fetch, this one tells. They are daemons: once one has failed, nobody waits for a silent hub."""
        waiting: queue.SimpleQueue[ListedFile] = queue.SimpleQueue()
        results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        for file in files:
            waiting.put(file)

        def work() -> None:
            try:
                with contextlib.suppress(queue.Empty):
                    while not self._stop.is_set():
                        self._bring(waiting.get_nowait())
            except BaseException as error:
                results.put(error)
            else:
                results.put(None)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(STREAMS, len(files)))]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                with contextlib.suppress(queue.Empty):
                    error = results.get(timeout=REPORT_S)
                    left -= 1
                    if error and not isinstance(error, _Stopped):
                        raise error
                self._tell()
        finally:
            self._stop.set()
            until = time.monotonic() + STOP_S
            for thread in threads:
                thread.join(max(0.0, until - time.monotonic()))

    def _bring(self, file: ListedFile) -> None:
        """The file in the snapshot, verified. A damaged one that was there before is fetched anew."""
        found = self._place(file) is not None
        self._provide(file)
        if self._verified(file):
            return
        self._cache.drop(self._path(file))
        if found:
            self.found_out = f"{file.name} was damaged in {self._cache.storage} and fetched anew"
            self._provide(file)
            if self._verified(file):
                return
            self._cache.drop(self._path(file))
        raise self._wrong(file)

    def _provide(self, file: ListedFile) -> None:
        if file.sha256:
            with self._writing[file.sha256]:  # two names may have the same content
                if self._place(file) is None:
                    self._fetch(file)
        if not self._path(file).exists():
            self.hub.cached_file(file.name, self._cache.root)

    def _verified(self, file: ListedFile) -> bool:
        path = self._path(file)

        def seen(count: int) -> None:
            self._done[file.name] = min(self._done[file.name] + count, file.size)

        self._done[file.name] = 0
        wanted = [Checksum("sha256", file.sha256, "the hub")] if file.sha256 else []
        if not file.sha256 and file.git_blob:
            wanted.append(Checksum("git blob", file.git_blob, "the hub"))
        if not file.sha256 and file.name in self._sha256:
            wanted.append(Checksum("sha256", self._sha256[file.name], "the recipe"))
        right = path.stat().st_size == file.size and all(self._hashes.match(path, each, seen) for each in wanted)
        self._done[file.name] = file.size if right else 0
        return right

    def _fetch(self, file: ListedFile) -> None:
        """A blob, from where it stopped. It is renamed once it is on the disk and its hash is right."""
        path = self._cache.unfinished(file.sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = _size(path) > 0
        if not self._complete(file, path) and not (begun and self._complete(file, path)):
            raise self._wrong(file)
        blob = self._cache.blob(file.sha256)
        path.replace(blob)
        _sync_folder(blob.parent)
        self._hashes.remember(blob, Checksum("sha256", file.sha256, "the hub"))

    def _complete(self, file: ListedFile, path: Path) -> bool:
        """Appends what is missing; False, and the file is gone, if the whole does not have the right hash."""
        hasher = hashlib.sha256()
        with path.open("ab", buffering=0) as local:
            start = done = local.tell()
            for block in blocks(path, start):
                hasher.update(block)
            self._done[file.name] = done
            remote = self.hub.stat(file.name) if start < file.size else None
            if remote and remote.size != file.size:
                raise HubError(f"{self._what(file)} has {remote.size:,} bytes, and the hub lists {file.size:,}.")
            for data in self.hub.stream(remote, start, file.size) if remote else ():
                if self._stop.is_set():  # before anything is written, since another fetch may be at it by now
                    raise _Stopped
                _write(local, data)
                hasher.update(data)
                done += len(data)
                self._done[file.name] = done
                if done - start >= SYNC:
                    _sync(local, start, done)
                    start = done
            _sync(local, start, done)
        if hasher.hexdigest() == file.sha256:
            return True
        path.unlink()
        return False

    def _wait(self, seconds: float) -> None:
        """Between two attempts."""
        note = f"the hub is busy or cannot be reached: the next attempt is in {seconds:.0f} s"
        if not self._total:  # while the files are listed, by the thread that tells
            self._progress(FetchProgress("listing", note=note))
        self._notes[threading.get_ident()] = note
        if self._stop.wait(seconds):
            raise _Stopped
        del self._notes[threading.get_ident()]

    def _tell(self) -> None:
        step: Literal["fetching", "checking"] = "fetching" if self._to_fetch else "checking"
        done = min(sum(self._done.values()), self._total)
        self._progress(FetchProgress(step, done, self._total, next(iter(list(self._notes.values())), "")))

    def _path(self, file: ListedFile) -> Path:
        return self._cache.snapshot(self.hub.revision) / file.name

    def _what(self, file: ListedFile) -> str:
        return f"{self.hub.repository}/{file.name}"

    def _wrong(self, file: ListedFile) -> FetchError:
        stated = "the recipe states" if file.name in self._sha256 else "the hub lists"
        return FetchError(
            f"{self._what(file)} arrived with another hash than {stated}; nothing of it is kept. Run the same command "
            "again; if that ends the same way, a proxy or the hub changes the file."
        )


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def free_bytes(folder: Path) -> int:
    """On the disk of a folder that need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _write(file: FileIO, data: bytes) -> None:
    """Unbuffered, so that closing the file after an error writes nothing."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _sync(file: FileIO, start: int, stop: int) -> None:
    os.fsync(file.fileno())
    forget(file.fileno(), start, stop - start)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
