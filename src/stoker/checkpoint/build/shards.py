"""Output files: which unit goes into which file at which offset, and how they are written.

The layout follows from headers alone, so it is known before a value is read and is the same for every run.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stoker.checkpoint.build.convert import pieces
from stoker.checkpoint.build.units import Copy, Out, Unit
from stoker.errors import CheckpointError
from stoker.weights.headers import ITEM_SIZES, TensorInfo

BUFFER = 8 << 20  # bytes copied at a time
UNFINISHED = ".part"

Advance = Callable[[int], None]  # bytes written since the last call


@dataclass(frozen=True)
class Shard:
    file: str
    units: tuple[Unit, ...]
    header: bytes
    places: Mapping[str, tuple[int, int]]  # tensor -> first byte and number of bytes
    size: int

    @property
    def tensors(self) -> Iterable[str]:
        return self.places.keys()


def pack(units: Sequence[Unit], limit: int) -> list[Shard]:
    """Units in order, in files of at most `limit` bytes of data; a larger unit gets a file of its own."""
    groups: list[list[Unit]] = []
    held = 0
    for unit in units:
        size = sum(out.nbytes for out in unit.outputs)
        if not groups or held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(unit)
        held += size
    if len(groups) == 1:
        return [_shard("model.safetensors", groups[0])]
    count = len(groups)
    return [_shard(f"model-{n:05d}-of-{count:05d}.safetensors", group) for n, group in enumerate(groups, 1)]


def _shard(file: str, units: Sequence[Unit]) -> Shard:
    outs = [out for unit in units for out in unit.outputs]
    # With wide dtypes first, every tensor is aligned to its items without gaps, which the format does not allow.
    outs.sort(key=lambda out: (-ITEM_SIZES[out.dtype], out.name))
    header, begins = _header(outs)
    places = {out.name: (len(header) + begin, out.nbytes) for out, begin in zip(outs, begins, strict=True)}
    return Shard(file, tuple(units), header, places, len(header) + sum(out.nbytes for out in outs))


def _header(outs: Sequence[Out]) -> tuple[bytes, list[int]]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses files without it
    begins, end = [], 0
    for out in outs:
        begins.append(end)
        end += out.nbytes
        entries[out.name] = {"dtype": out.dtype, "shape": list(out.shape), "data_offsets": [begins[-1], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins


def write_shard(path: Path, shard: Shard, block: int, advance: Advance) -> None:
    """Writes under another name, flushes to the disk and renames: a file with its final name is complete."""
    unfinished = path.with_name(path.name + UNFINISHED)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(descriptor, memoryview(shard.header), 0)
        buffer = memoryview(bytearray(BUFFER))
        for unit in shard.units:
            if isinstance(unit, Copy):
                copy_bytes(unit.info, descriptor, shard.places[unit.out.name][0], buffer, advance)
            else:
                _convert(unit, shard, descriptor, block, advance)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    unfinished.rename(path)


def _convert(unit: Unit, shard: Shard, descriptor: int, block: int, advance: Advance) -> None:
    assert not isinstance(unit, Copy)
    written = dict.fromkeys((out.name for out in unit.outputs), 0)
    for name, values in pieces(unit, block):
        data = as_bytes(values)
        _write_all(descriptor, data, shard.places[name][0] + written[name])
        written[name] += len(data)
        advance(len(data))
    for out in unit.outputs:
        assert written[out.name] == out.nbytes, (out, written[out.name])


def as_bytes(values: Tensor) -> memoryview:
    array: Any = values.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def copy_bytes(info: TensorInfo, target: int, offset: int, buffer: memoryview, advance: Advance) -> None:
    """The bytes of a tensor from its file into another, a buffer at a time."""
    source = os.open(info.file, os.O_RDONLY)
    try:
        done = 0
        while done < info.nbytes:
            count = os.preadv(source, [buffer[: min(len(buffer), info.nbytes - done)]], info.offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{info.file} ended while copying {info.name}: {done:,} of {info.nbytes:,} bytes; "
                    "fetch the file again."
                )
            _write_all(target, buffer[:count], offset + done)
            done += count
            advance(count)
    finally:
        os.close(source)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def sha256(path: Path) -> str:
    """Of the file as read back from the disk. Drops its pages from the cache, since nothing reads it again soon."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest
