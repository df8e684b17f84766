"""From a hub only the tensors a recipe takes, into a small safetensors file per remote file. Resumes after a kill.

The index tells which files hold them, their headers tell where; ranges that lie close together are one request.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from stoker.checkpoint.build.sources import Source
from stoker.checkpoint.build.workspace import write_synced
from stoker.weights.checkpoint import INDEX, Checkpoint
from stoker.weights.headers import MAX_HEADER, read_header
from stoker.weights.hub import Hub, HubError, RemoteFile, parse_repository
from stoker.weights.json_file import parse_json, read_json

GAP = 1 << 20  # bytes between two wanted tensors that are cheaper to read than to ask again
SYNC = 64 << 20  # bytes after which progress is made durable

Progress = Callable[[int, int], None]  # bytes so far, bytes in all
Wanted = Callable[[str], bool]
MakeHub = Callable[[str, str], Hub]


@dataclass(frozen=True)
class _Part:
    """Wanted tensors of one remote file."""

    file: RemoteFile
    entries: Sequence[tuple[str, dict[str, Any]]]  # by place in the remote file
    data: int  # where tensor data begins in the remote file

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in (entry["data_offsets"] for _, entry in self.entries))


def fetch(
    option: str,
    where: str,
    wanted: Wanted,
    fetched: Path,
    make_hub: MakeHub | None = None,
    progress: Progress | None = None,
) -> Source:
    """The wanted tensors of hf:REPO[@REVISION], and the names of all others for the account."""
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
    # An index may leave out whole files (MTP heads often): those are asked for what they hold.
    unlisted = set(weights) - {str(file) for file in listed.values()}
    names = set(listed)
    parts = []
    for name in sorted(homes | unlisted):
        file, header, data = _header(hub, name)
        names |= header.keys()
        entries = sorted(
            ((tensor, entry) for tensor, entry in header.items() if wanted(tensor)),
            key=lambda item: item[1]["data_offsets"],
        )
        if entries:
            parts.append(_Part(file, entries, data))
    if not parts:
        raise HubError(f"{option} {where}: the repository has none of the tensors this recipe takes from it.")
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


def _header(hub: Hub, name: str) -> tuple[RemoteFile, dict[str, Any], int]:
    """A file's tensors and where their data begins. Offsets are checked here, dtypes and shapes on reading back."""
    file = hub.stat(name)
    where = f"{hub.repository}/{name}"
    length = int.from_bytes(hub.read(file, 0, min(8, file.size)), "little")
    data = 8 + length
    if file.size < 8 or length > MAX_HEADER or data > file.size:
        raise HubError(
            f"{where} of {file.size:,} bytes is no whole safetensors file: it announces {length:,} of header."
        )
    try:
        header = parse_json(hub.read(file, 8, data))
        header.pop("__metadata__", None)
        ends = [_offsets(entry) for entry in header.values()]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise HubError(f"{where} has a header that cannot be read ({error}).") from None
    if any(not 0 <= begin <= end <= file.size - data for begin, end in ends):
        raise HubError(f"{where} is cut short: its header names bytes beyond its {file.size:,}.")
    ends.sort()
    if any(begin < before for (_, before), (begin, _) in pairwise(ends)):
        raise HubError(f"{where} has a header whose tensors overlap; it is damaged.")
    return file, header, data


def _offsets(entry: Mapping[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    return int(begin), int(end)


def _fetch_part(hub: Hub, part: _Part, directory: Path) -> Iterable[int]:
    """Writes the wanted tensors behind one another; yields byte counts as they arrive or are found to be here."""
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
        finally:  # a hub that gives up leaves what it gave
            _record(local, progress, part, done)
    read_header(unfinished)  # dtypes, shapes and lengths agree
    unfinished.rename(path)


def _wanted_bytes(hub: Hub, part: _Part, skip: int) -> Iterable[bytes]:
    """The wanted bytes in order, from the `skip`-th on. Bytes between wanted tensors are read over."""
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
    """First byte, last byte and the wanted stretches between them, in places of the remote file."""
    spans: list[tuple[int, int]] = []
    for _, entry in part.entries:
        begin, end = (part.data + place for place in _offsets(entry))
        if spans and begin - spans[-1][1] > GAP:
            yield spans[0][0], spans[-1][1], spans
            spans = []
        spans.append((begin, end))
    yield spans[0][0], spans[-1][1], spans


def _local_header(part: _Part) -> bytes:
    entries, end = {}, 0
    for name, entry in part.entries:
        begin, size = end, entry["data_offsets"][1] - entry["data_offsets"][0]
        end += size
        entries[name] = {**entry, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def _record(local: BinaryIO, progress: Path, part: _Part, done: int) -> None:
    """What the disk holds for sure, and of which version of the remote file."""
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
