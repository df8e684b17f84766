"""The header of a safetensors file: names, dtypes, shapes and offsets, checked against each other and the file size.

`scan_header` reads as far as it makes sense and makes a `Problem` of each fault; `read_header` raises the first error.
No torch.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from stoker.errors import brief
from stoker.weights.json_file import open_file, parse_json
from stoker.weights.problems import Problem, count, refuse_errors

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
MAX_NAME = 1000  # characters; published names have up to a hundred
MAX_DIMENSIONS = 16
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str  # as in the header: BF16, F32, I32, ...
    shape: tuple[int, ...]
    file: Path
    offset: int  # first byte in the file
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass
class Reads:
    """Reads parts of files and counts the bytes, so that a test can tell that no tensor was read whole."""

    count: int = 0

    def __call__(self, path: Path, offset: int, length: int) -> bytes:
        with open_file(path) as file:
            file.seek(offset)
            data = file.read(length) or b""
        self.count += len(data)
        return data


@dataclass
class Header:
    """What one file holds. `tensors` includes those in `cut`, whose bytes are not all there."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    size: int = 0  # bytes of the file
    readable: bool = False
    cut: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of one file; raises the first problem."""
    header = scan_header(path)
    refuse_errors(header.problems, path.parent)
    return header.tensors


def scan_header(path: Path, reads: Callable[[Path, int, int], bytes] | None = None, size: int | None = None) -> Header:
    """All well-formed tensors of one file, and what is wrong with the others and with the file.

    `reads` and `size` are given for a file that is not on this machine.
    """
    reads, name, header = reads or Reads(), path.name, Header()

    def refuse(message: str, tensor: str | None = None, fix: str = f"Fetch {name} again.") -> None:
        header.problems.append(Problem("error", f"{name} {message}", name, tensor, fix))

    try:
        size = header.size = os.path.getsize(path) if size is None else size
        announced = reads(path, 0, 8)
        length = int.from_bytes(announced, "little")
        if len(announced) < 8 or length > MAX_HEADER or 8 + length > size:
            if size > 8 and reads(path, 0, len(LFS_POINTER)) == LFS_POINTER:
                refuse(f"is a Git LFS pointer of {size} bytes, not the weights.", fix="Run git lfs pull, or fetch it.")
                return header
            shown = f"{length:,}" if len(announced) == 8 else "unknown length"
            refuse(f"is not a whole safetensors file: it has {size:,} bytes and announces a header of {shown}.")
            return header
        text = reads(path, 8, length)
    except OSError as error:
        refuse(f"cannot be read: {error.strerror}.", fix="Check its permissions, or fetch it again.")
        return header
    repeated: list[str] = []
    try:
        raw = parse_json(text, lambda pairs: _object(pairs, repeated))
    except ValueError as error:
        refuse(f"has a header that is not JSON ({error}).")
        return header
    if not isinstance(raw, dict):
        refuse(f"has a header that is a JSON {type(raw).__name__}, expected an object.")
        return header
    header.readable = True
    raw.pop("__metadata__", None)
    if repeated:
        tensors = [key for key in repeated if key in raw]
        twice = f"{count(tensors)} twice in its header, first" if tensors else "a field of a tensor twice:"
        refuse(f"names {twice} {(tensors or repeated)[0]}.", (tensors or repeated)[0])
    _enter(raw, path, 8 + length, header)
    return header


def _object(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """A JSON object; duplicate keys, of which json would silently drop one, are added to `repeated`."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeated.append(key)
            seen.add(key)
    return made


def _enter(raw: Mapping[str, Any], path: Path, data: int, header: Header) -> None:
    """Adds the tensors to `header`, and problems for those that are malformed, truncated or overlapping."""
    malformed: list[tuple[str, str]] = []
    for name, entry in raw.items():
        info = _tensor(name, entry, path, data)
        if isinstance(info, str):
            malformed.append((name, info))
            continue
        header.tensors[name] = info
        if info.end > header.size:
            header.cut.append(name)
    file, size, fix = path.name, header.size, f"Fetch {path.name} again."
    if malformed:
        (name, reason), more = malformed[0], f" ({len(malformed):,} such tensors)" if len(malformed) > 1 else ""
        header.problems.append(Problem("error", f"{file}: {name[:200]} {reason}{more}.", file, name, fix))
    placed = sorted((info for info in header.tensors.values() if info.nbytes), key=lambda info: info.offset)
    end = max((info.end for info in placed), default=data)
    if header.cut:
        first = min(header.cut, key=lambda name: header.tensors[name].offset)
        message = f"{file} is cut short: its header needs {end:,} bytes and it has {size:,}, "
        message += f"so {count(header.cut, ' is', ' are')} not whole, first {first}."
        header.problems.append(Problem("error", message, file, first, fix))
    between = 0  # bytes
    for before, after in pairwise(placed):
        if before.end > after.offset:
            message = f"{file}: {before.name} and {after.name} share bytes, so at least one of them is wrong."
            header.problems.append(Problem("error", message, file, after.name, fix))
            break
        between += after.offset - before.end
    else:
        between += placed[0].offset - data if placed else 0
        for unowned, where in ((between, "before or between its tensors"), (size - end, "behind its last tensor")):
            if unowned > 0 and not malformed:
                message = f"{file} has {unowned:,} bytes {where} that no tensor owns."
                fix = "Harmless if the tensors are right; --verify tells."
                header.problems.append(Problem("note", message, file, fix=fix))


def _tensor(name: str, entry: Any, path: Path, data: int) -> TensorInfo | str:
    """The tensor, or a message that says what is wrong with its name or entry."""
    if not name.isprintable():
        return "has characters in its name that no tensor name has"
    if len(name) > MAX_NAME:
        return f"… has a name of {len(name):,} characters, expected at most {MAX_NAME:,}"
    if not _well_formed(entry):
        return f"has a malformed header entry, {brief(entry)}"
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in ITEM_SIZES:
        return f"has dtype {brief(dtype)}, expected one of {', '.join(ITEM_SIZES)}"
    if (needed := prod(shape) * ITEM_SIZES[dtype]) != end - begin:
        return f"of shape {list(shape)} in {dtype} needs {brief(needed)} bytes and its header gives it {end - begin:,}"
    return TensorInfo(name, dtype, shape, path, data + begin, end - begin)


def _well_formed(entry: Any) -> bool:
    """{"dtype": str, "shape": sizes, "data_offsets": [begin, end]}, all numbers whole and within 63 bits."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)

    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape", ()), entry.get("data_offsets", ())  # no lists
    if not sizes(shape) or not sizes(offsets):
        return False
    return len(shape) <= MAX_DIMENSIONS and len(offsets) == 2 and offsets[0] <= offsets[1]
