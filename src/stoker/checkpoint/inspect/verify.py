"""Reads every byte of a checkpoint once, in bounded memory: looks for NaN and Inf, compares checksums. No torch."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

import numpy as np

from stoker.checkpoint.inspect.checksums import find_checksums
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.headers import ITEM_SIZES, TensorInfo
from stoker.weights.json_file import open_file
from stoker.weights.problems import Problem, count

BLOCK = 4 << 20  # bytes in memory per reader, and as many again while they are checked
READERS = 4
Progress = Callable[[int, int], None]  # bytes read so far, bytes in all

# A value is NaN or Inf where all bits of this mask are set; E4M3 and E8M0 have no Inf and one NaN pattern.
NON_FINITE = {
    "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF0000000000000),
    "F8_E4M3": ("u1", 0x7F), "F8_E5M2": ("u1", 0x7C), "F8_E8M0": ("u1", 0xFF),
}  # fmt: skip


@dataclass(frozen=True)
class VerifyReport:
    bytes: int
    files: int  # safetensors files read
    matching: int  # files with a known checksum that is right
    without_checksum: tuple[str, ...]  # safetensors files that came with none
    problems: tuple[Problem, ...]


@dataclass
class _File:
    """What one pass over one file found."""

    name: str
    bad: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # tensor -> number of NaN or Inf values, index of the first
    digest: str | None = None
    error: str | None = None


def verify(checkpoint: Checkpoint, progress: Progress | None = None) -> VerifyReport:
    checksums = find_checksums(checkpoint.directory)
    names = [name for name in dict.fromkeys((*checkpoint.sizes, *checksums)) if (checkpoint.directory / name).is_file()]
    tensors: dict[str, list[TensorInfo]] = {}
    for info in sorted(checkpoint.tensors.values(), key=lambda info: info.offset):
        tensors.setdefault(info.file.name, []).append(info)
    total, done, lock, stop = sum((checkpoint.directory / name).stat().st_size for name in names), 0, Lock(), Event()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress:
                progress(done, total)

    def read(name: str) -> _File:
        found, path, checksum = _File(name), checkpoint.directory / name, checksums.get(name)
        hash_ = checksum.start(path.stat().st_size) if checksum else None
        try:
            for offset, block in _blocks(path, tensors.get(name, []), stop):
                if hash_:
                    hash_.update(block)
                _look(offset, block, tensors.get(name, []), found.bad)
                advance(len(block))
        except OSError as error:
            found.error = error.strerror
        found.digest = hash_.hexdigest() if hash_ else None
        return found

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        try:
            results = list(pool.map(read, names))
        except BaseException:  # on Ctrl-C, the readers would otherwise read their files to the end
            stop.set()
            raise
    problems, matching = [], 0
    for found in results:
        checksum = checksums.get(found.name)
        matching += checksum is not None and found.digest == checksum.digest
        problems += _problems(found)
        if checksum and found.digest != checksum.digest and not found.error:
            problems.append(_mismatch(found, f"{checksum.kind} {found.digest}", checksum.digest, checksum.source))
    for name, checksum in checksums.items():
        if name.endswith(".safetensors") and name not in names and name not in checkpoint.sizes:
            message = f"{checksum.source} has a checksum for {name}, which does not exist."
            problems.append(Problem("error", message, name, fix=f"Fetch {name}."))
    without = tuple(name for name in checkpoint.sizes if name not in checksums)
    return VerifyReport(done, len(checkpoint.sizes), matching, without, tuple(problems))


def _mismatch(found: _File, got: str, expected: str, source: str) -> Problem:
    name = found.name
    message = f"{name} has {got}, {source} says {expected}."
    if name.endswith(".safetensors"):
        return Problem("error", message, name, fix=f"Fetch {name} again.")
    return Problem("note", message, name, fix="Nothing to do if it was edited on purpose, else fetch it again.")


def _problems(found: _File) -> list[Problem]:
    name = found.name
    if found.error:
        return [
            Problem("error", f"{name} could not be read to its end: {found.error}.", name, fix=f"Fetch {name} again.")
        ]
    if not found.bad:
        return []
    tensor, (number, first) = next(iter(found.bad.items()))
    message = f"{name}: {count(list(found.bad), ' holds', ' hold')} NaN or Inf, first {tensor} "
    message += f"({number:,} values, the first at element {first:,})."
    fix = "Fetch the file again; if it stays so, the checkpoint itself is broken."
    return [Problem("error", message, name, tensor, fix)]


def _blocks(path: Path, tensors: list[TensorInfo], stop: Event) -> Iterator[tuple[int, memoryview]]:
    """The file in order, cut so that no element of a tensor lies in two blocks."""
    buffer = memoryview(bytearray(BLOCK))
    starts = [info.offset for info in tensors]
    offset = 0
    with open_file(path) as file:
        while not stop.is_set() and (got := file.readinto(buffer)):
            end = offset + got
            at = bisect_right(starts, end) - 1
            if got == BLOCK and at >= 0 and end < tensors[at].offset + tensors[at].nbytes:
                end -= (end - tensors[at].offset) % ITEM_SIZES[tensors[at].dtype]
                file.seek(end)
            yield offset, buffer[: end - offset]
            if hasattr(os, "posix_fadvise"):  # a running model may need the page cache
                os.posix_fadvise(file.fileno(), offset, end - offset, os.POSIX_FADV_DONTNEED)
            offset = end


def _look(offset: int, block: memoryview, tensors: list[TensorInfo], bad: dict[str, tuple[int, int]]) -> None:
    end = offset + len(block)
    at = max(bisect_right(tensors, offset, key=lambda info: info.offset) - 1, 0)
    for info in tensors[at:]:
        if info.offset >= end:
            break
        begin, stop = max(info.offset, offset), min(info.offset + info.nbytes, end)
        if info.dtype not in NON_FINITE or begin >= stop:
            continue
        kind, mask = NON_FINITE[info.dtype]
        whole = (stop - begin) // ITEM_SIZES[info.dtype]  # a truncated file may end inside an element
        values = np.frombuffer(block, kind, whole, begin - offset)
        wrong = (values & mask) == mask
        if number := int(np.count_nonzero(wrong)):
            before, first = bad.get(info.name, (0, -1))
            place = (begin - info.offset) // ITEM_SIZES[info.dtype] + int(wrong.argmax())
            bad[info.name] = (before + number, first if before else place)
