"""Checksums that came with a checkpoint, and where they were found. Supported:

- `stoker.json`, in which `stoker build` records what it wrote;
- `*.sha256` and `SHA256SUMS` in the directory: lines of `sha256sum`, or a bare hash in FILE.sha256;
- `.cache/huggingface/download/FILE.metadata`, written by `hf download --local-dir`: its second line is the etag;
- the hub's cache, where files are links into `blobs/` and a blob is named by its etag.

An etag is the sha256 of a large file and the git blob id (a sha1) of a small one; other etags are left alone.
"""

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from stoker.errors import StokerError
from stoker.weights.json_file import read_json, read_small

MANIFEST = "stoker.json"

MAX_LIST = 10_000_000  # bytes of a list of checksums
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
LINE = re.compile(r"^\\?([0-9a-fA-F]{64})(?:\s+\*?(.+))?$")
ETAG = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Checksum:
    kind: Literal["sha256", "git blob"]
    digest: str
    source: str  # the file that it was read from

    def start(self, size: int) -> Hash:
        """A hash object that yields `digest` once it has been updated with the whole file of `size` bytes."""
        if self.kind == "sha256":
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def find_checksums(directory: Path) -> dict[str, Checksum]:
    """Path below `directory` -> checksum; those computed on this machine take precedence over the hub's."""
    found: dict[str, Checksum] = {}
    for path in directory.iterdir():
        if path.is_symlink() and path.resolve().parent.name == "blobs":
            _add_etag(found, path.name, path.resolve().name, "the hub cache")
    downloads = directory / ".cache" / "huggingface" / "download"
    for path in sorted(downloads.glob("**/*.metadata")):
        lines = _lines(path)
        if len(lines) >= 2:
            name = path.relative_to(downloads).as_posix().removesuffix(".metadata")
            _add_etag(found, name, lines[1].strip().strip('"'), path.name)
    for path in sorted([*directory.glob("*.sha256"), *directory.glob("SHA256SUMS")]):
        for line in _lines(path):
            if match := LINE.match(line.strip()):
                _add(found, match[2] or path.name.removesuffix(".sha256"), match[1].lower(), path.name)
    if (directory / MANIFEST).exists():
        with suppress(StokerError):
            files = read_json(directory / MANIFEST).get("files")
            for name, entry in files.items() if isinstance(files, dict) else ():
                digest = entry.get("sha256") if isinstance(entry, dict) else None
                if isinstance(digest, str) and DIGEST.fullmatch(digest):
                    _add(found, name, digest.lower(), MANIFEST)
    return found


def _lines(path: Path) -> list[str]:
    """Empty for what is not a file, or is far too large for a list of checksums."""
    try:
        return read_small(path, MAX_LIST).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _add(found: dict[str, Checksum], name: str, digest: str, source: str) -> None:
    path = PurePosixPath(name)  # which drops a leading "./", as sha256sum writes it
    if not path.is_absolute() and ".." not in path.parts:
        found[str(path)] = Checksum("sha256", digest, source)


def _add_etag(found: dict[str, Checksum], file: str, etag: str, source: str) -> None:
    if ETAG.fullmatch(etag):
        found[file] = Checksum("sha256" if len(etag) == 64 else "git blob", etag, source)
