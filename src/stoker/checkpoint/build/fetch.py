"""Fetches only the tensors that a build takes, into a safetensors file per remote file. Resumes after a kill.

The index tells which files hold them, their headers tell where; ranges that lie close together are one request.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stoker.checkpoint.build.sources import Source
from stoker.checkpoint.build.workspace import write_synced
from stoker.weights.checkpoint import INDEX, Checkpoint
from stoker.weights.headers import TensorInfo, read_header, scan_header
from stoker.weights.hub import Hub, HubError, RemoteFile, parse_repository
from stoker.weights.json_file import read_json

GAP = 1 << 20  # bytes between two wanted tensors that are cheaper to read than another request
SYNC = 64 << 20  # bytes after which progress is flushed to the disk

Progress = Callable[[int, int], None]  # bytes so far, bytes in all
Wanted = Callable[[str], bool]
MakeHub = Callable[[str, str], Hub]


@dataclass(frozen=True)
class _Part:
    """Wanted tensors of one remote file, in the order in which they lie there."""

    file: RemoteFile
    tensors: Sequence[TensorInfo]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors)


def fetch(
    option: str,
    where: str,
    wanted: Wanted,
    fetched: Path,
    make_hub: MakeHub | None = None,
    progress: Progress | None = None,
) -> Source:
    """The wanted tensors of hf:REPO[@REVISION], and the names of all others, which the report accounts for."""
    repository, revision = parse_repository(where)
    directory = fetched / f"{option.strip('-')}-{repository.replace('/', '--')}@{revision.replace('/', '--')}"
    hub = (make_hub or Hub)(repository, _pinned(directory) or revision)
    files = hub.pin()
    _remember(directory, hub.revision)
    index = hub.json_file(INDEX) if INDEX in files else {}
    config = hub.json_file("config.json") if "config.json" in files else {}
    write_synced(directory / "config.json", json.dumps(config, indent=2).encode())
    listed = index.get("weight_map") or {}
    if not isinstance(listed, dict):
        raise HubError(f"{repository}: the weight_map of {INDEX} is no object.")
    weights = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    homes = {str(file) for name, file in listed.items() if wanted(name)}
    if missing := homes - set(weights):
        raise HubError(f"{repository}: {INDEX} names {sorted(missing)[0]}, which the repository does not have.")
    # An index may leave out whole files (MTP heads often): read the headers of those.
    unlisted = set(weights) - {str(file) for file in listed.values()}
    names = set(listed)
    parts = []
    for name in sorted(homes | unlisted):
        file, header = _header(hub, name)
        names |= header.keys()
        tensors = sorted(
            (info for info in header.values() if wanted(info.name)), key=lambda info: (info.offset, info.end)
        )
        if tensors:
            parts.append(_Part(file, tensors))
    if not parts:
        raise HubError(f"{option} {where}: the repository has none of the tensors this build takes from it.")
    total = sum(part.nbytes for part in parts)
    done = 0
    for part in parts:
        for count in _fetch_part(hub, part, directory):
            done += count
            if progress:
                progress(done, total)
    checkpoint = Checkpoint.open(directory)
    size = index.get("metadata", {}).get("total_size") if isinstance(index.get("metadata"), Mapping) else None
    of = size if type(size) is int else sum(part.file.size for part in parts)
    identity = {"repository": repository, "revision": hub.revision, "tensor_bytes": total, "repository_bytes": of}
    return Source(option, where, checkpoint, sorted(names), identity)


def _pinned(directory: Path) -> str:
    """The commit an interrupted fetch began with: a branch may have moved on since."""
    path = directory / "commit.json"
    return str(read_json(path)["commit"]) if path.exists() else ""


def _remember(directory: Path, commit: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_synced(directory / "commit.json", json.dumps({"commit": commit}).encode())


def _header(hub: Hub, name: str) -> tuple[RemoteFile, dict[str, TensorInfo]]:
    file = hub.stat(name)

    def read(path: Path, start: int, length: int) -> bytes:
        return hub.read(file, start, min(start + length, file.size))

    header = scan_header(Path(name), read, file.size)
    for problem in header.problems:
        if problem.severity == "error":
            raise HubError(f"{hub.repository}/{problem.message}")
    return file, header.tensors


def _fetch_part(hub: Hub, part: _Part, directory: Path) -> Iterable[int]:
    """Writes the wanted tensors one after another; yields byte counts as they arrive or are found on the disk."""
    path = directory / part.file.name
    if path.exists():
        _check_unchanged(part, directory)
        yield part.nbytes
        return
    unfinished, progress = path.with_name(path.name + ".part"), path.with_name(path.name + ".progress")
    header = _local_header(part)
    done = 0
    if progress.exists() and unfinished.exists():
        _check_unchanged(part, directory)
        done = min(int(read_json(progress)["done"]), unfinished.stat().st_size - len(header))
    with unfinished.open("r+b" if done > 0 else "wb") as local:
        done = synced = max(done, 0)
        local.truncate(len(header) + done if done else 0)
        local.write(header)
        local.seek(len(header) + done)
        yield done
        try:
            for data in _wanted_bytes(hub, part, done):
                local.write(data)
                done += len(data)
                if done - synced >= SYNC:
                    _record(local, progress, part, done)
                    synced = done
                yield len(data)
        finally:  # what arrived is kept when the hub fails
            _record(local, progress, part, done)
    read_header(unfinished)  # raises unless it is whole
    unfinished.rename(path)


def _wanted_bytes(hub: Hub, part: _Part, skip: int) -> Iterable[bytes]:
    """The wanted bytes in order, from the `skip`-th on. Bytes between wanted tensors are read and dropped."""
    for start, stop, wanted in _requests(part):
        size = sum(end - begin for begin, end in wanted)
        if skip >= size:
            skip -= size
            continue
        left = []  # of this request
        for begin, end in wanted:
            cut = min(skip, end - begin)
            skip -= cut
            if begin + cut < end:
                left.append((begin + cut, end))
        position = max(start, left[0][0])
        for data in hub.stream(part.file, position, stop):
            for begin, end in left:
                if begin < position + len(data) and position < end:
                    yield data[max(begin - position, 0) : end - position]
            position += len(data)


def _requests(part: _Part) -> Iterable[tuple[int, int, list[tuple[int, int]]]]:
    """First byte, end and the wanted ranges between them, as offsets in the remote file."""
    spans: list[tuple[int, int]] = []
    for info in part.tensors:
        if spans and info.offset - spans[-1][1] > GAP:
            yield spans[0][0], spans[-1][1], spans
            spans = []
        spans.append((info.offset, info.end))
    yield spans[0][0], spans[-1][1], spans


def _local_header(part: _Part) -> bytes:
    entries, end = {}, 0
    for info in part.tensors:
        begin, end = end, end + info.nbytes
        entries[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def _record(local: BinaryIO, progress: Path, part: _Part, done: int) -> None:
    """Records how many bytes are safely on the disk, and of which version of the remote file."""
    local.flush()
    os.fsync(local.fileno())
    write_synced(progress, json.dumps({"done": done, "size": part.file.size, "etag": part.file.etag}).encode())


def _check_unchanged(part: _Part, directory: Path) -> None:
    seen = read_json(directory / f"{part.file.name}.progress")
    if (seen["size"], seen["etag"]) != (part.file.size, part.file.etag):
        raise HubError(
            f"{part.file.name} changed on the hub since a part of it was fetched (size {seen['size']:,} then, "
            f"{part.file.size:,} now); remove {directory} to fetch it anew."
        )
