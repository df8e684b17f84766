"""What lies in a checkpoint directory, and whether headers, sizes and index agree. No torch, no values.

`checkpoint` and `header` stop at the first thing that is wrong; here every file is read as far as it makes sense and
each fault becomes a `Problem`.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal

from stoker.errors import StokerError
from stoker.weights.checkpoint import INDEX, PICKLES, weight_files
from stoker.weights.formats.layout import INSTEAD
from stoker.weights.groups import MTP, group_of
from stoker.weights.header import ITEM_SIZES, MAX_HEADER, TensorInfo
from stoker.weights.json_file import read_json

LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Problem:
    """An error keeps the checkpoint from being used as it is; a note is worth knowing."""

    severity: Literal["error", "note"]
    message: str  # one sentence
    file: str | None = None
    tensor: str | None = None  # the first, where several are affected
    fix: str = ""


@dataclass
class Reads:
    """Reads parts of files and counts the bytes, which is how a test knows that no tensor was read whole."""

    count: int = 0

    def __call__(self, path: Path, offset: int, length: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(length) or b""
        self.count += len(data)
        return data


@dataclass
class Files:
    """The safetensors files of a directory. `tensors` has the first copy of each name, cut-short ones included."""

    directory: Path
    sizes: dict[str, int] = field(default_factory=dict)  # bytes per file
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    readable: set[str] = field(default_factory=set)  # files whose header could be read
    cut: set[str] = field(default_factory=set)  # tensors whose bytes are not all there
    problems: list[Problem] = field(default_factory=list)


def scan(directory: Path, reads: Reads) -> Files:
    files = Files(directory)
    for path in weight_files(directory):
        _scan_file(path, files, reads)
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if not files.sizes:
        files.problems.append(_no_weights(directory, pickles))
    elif pickles:
        files.problems.append(
            Problem(
                "note",
                f"{len(pickles)} pickle file(s), first {pickles[0]}, can run code when opened and are never read.",
                file=pickles[0],
                fix="Delete them unless something else needs them.",
            )
        )
    files.problems += _unfinished(directory)
    files.problems += compare_with_index(files)
    return files


def compare_with_index(files: Files) -> list[Problem]:
    """The index against the headers: missing files, tensors that are absent, elsewhere, or not listed."""
    path = files.directory / INDEX
    if not path.exists():
        if len(files.sizes) < 2:
            return []
        fix = f"Stoker reads every file all the same; other engines need {INDEX}, so fetch it."
        return [Problem("note", f"There is no {INDEX} beside {len(files.sizes)} safetensors files.", INDEX, fix=fix)]
    try:
        listed = read_json(path).get("weight_map")
    except StokerError as error:
        return [Problem("error", str(error), INDEX, fix="Fetch the index again.")]
    if not isinstance(listed, dict):
        return [Problem("error", f"{INDEX} has no weight_map.", INDEX, fix="Fetch the index again.")]
    by_file: dict[str, list[str]] = {}
    for name, file in listed.items():
        by_file.setdefault(str(file), []).append(name)
    problems = []
    for file, names in sorted(by_file.items()):
        if file not in files.sizes:
            message = f"{INDEX} lists {count(names)} in {file}, which does not exist."
            problems.append(Problem("error", message, file, names[0], f"Fetch {file}."))
        elif file in files.readable:  # of an unreadable one enough has been said
            problems += _compare_file(file, names, files)
    return problems + _unlisted(files, listed)


def _compare_file(file: str, names: list[str], files: Files) -> list[Problem]:
    absent = [name for name in names if name not in files.tensors]
    elsewhere: dict[str, list[str]] = {}
    for name in names:
        if name in files.tensors and (home := files.tensors[name].file.name) != file:
            elsewhere.setdefault(home, []).append(name)
    problems = []
    if absent:
        message = f"{INDEX} lists {count(absent)} in {file} that no file holds, first {absent[0]}."
        problems.append(Problem("error", message, file, absent[0], f"Fetch {file} and the index again."))
    for home, moved in elsewhere.items():
        message = f"{INDEX} lists {count(moved)} in {file} that belong to {home}, first {moved[0]}."
        problems.append(Problem("error", message, file, moved[0], "Fetch the index again."))
    return problems


def _unlisted(files: Files, listed: dict[str, Any]) -> list[Problem]:
    extra: dict[str, list[str]] = {}
    for name, info in files.tensors.items():
        if name not in listed:
            extra.setdefault(info.file.name, []).append(name)
    problems = []
    for file, names in extra.items():
        mtp = sum(group_of(name) == MTP for name in names)
        of = f" of {file}" + (f" ({mtp:,} of them MTP)" if mtp else "")
        fix = "Stoker reads them all the same; engines that follow the index need them listed"
        fix += f": stoker build --base {files.directory} --out NEW writes a whole index."
        message = f"{count(names, f'{of} is', f'{of} are')} missing from {INDEX}, first {names[0]}."
        problems.append(Problem("note", message, file, names[0], fix))
    return problems


def _scan_file(path: Path, files: Files, reads: Reads) -> None:
    name = path.name
    try:
        size = files.sizes[name] = os.path.getsize(path)
        announced = reads(path, 0, 8)
        length = int.from_bytes(announced, "little")
        if size > 8 and reads(path, 0, len(LFS_POINTER)) == LFS_POINTER:
            message = f"{name} is a Git LFS pointer of {size} bytes, not the weights."
            files.problems.append(Problem("error", message, name, fix="Run git lfs pull, or fetch the file itself."))
            return
        if len(announced) < 8 or length > MAX_HEADER or 8 + length > size:
            message = f"{name} is not a whole safetensors file: it has {size:,} bytes and announces a header of "
            message += f"{length:,}." if len(announced) == 8 else "unknown length."
            files.problems.append(Problem("error", message, name, fix=f"Fetch {name} again."))
            return
        text = reads(path, 8, length)
    except OSError as error:
        files.sizes.setdefault(name, 0)
        message = f"{name} cannot be read: {error.strerror}."
        files.problems.append(Problem("error", message, name, fix="Check its permissions, or fetch it again."))
        return
    repeated: list[str] = []
    try:
        raw = json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, repeated))
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        files.problems.append(
            Problem("error", f"{name} has a header that is not JSON ({reason}).", name, fix=f"Fetch {name} again.")
        )
        return
    if not isinstance(raw, dict):
        message = f"{name} has a header that is a JSON {type(raw).__name__}, expected an object."
        files.problems.append(Problem("error", message, name, fix=f"Fetch {name} again."))
        return
    files.readable.add(name)
    raw.pop("__metadata__", None)
    if repeated:
        message = f"{name} names {count(repeated)} twice in its header, first {repeated[0]}."
        files.problems.append(Problem("error", message, name, repeated[0], f"Fetch {name} again."))
    _enter(path, size, 8 + length, raw, files)


def _object(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """A JSON object that remembers keys given twice, which json would drop without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                repeated.append(key)
            seen.add(key)
    return made


def _enter(path: Path, size: int, data: int, raw: dict[str, Any], files: Files) -> None:
    """Tensors of one header into `files`: malformed entries, doubles and a short file become problems."""
    file, end_of_data = path.name, data
    malformed: list[tuple[str, str]] = []
    doubles: dict[str, list[str]] = {}
    cut: list[TensorInfo] = []
    entered: list[TensorInfo] = []
    for name, entry in raw.items():
        info = _info(path, data, name, entry)
        if isinstance(info, str):
            malformed.append((name, info))
            continue
        end_of_data = max(end_of_data, info.offset + info.nbytes)
        entered.append(info)
        if name in files.tensors:
            doubles.setdefault(files.tensors[name].file.name, []).append(name)
            continue
        files.tensors[name] = info
        if info.offset + info.nbytes > size:
            cut.append(info)
            files.cut.add(name)
    for name, reason in malformed[:1]:
        more = f" ({len(malformed)} such tensors)" if len(malformed) > 1 else ""
        files.problems.append(Problem("error", f"{file}: {name} {reason}{more}.", file, name, f"Fetch {file} again."))
    for other, names in doubles.items():
        message = f"{count(names, ' is', ' are')} in both {other} and {file}, first {names[0]}."
        fix = f"Remove {file} if it is left over from a merge or a conversion, else {other}."
        files.problems.append(Problem("error", message, file, names[0], fix))
    if end_of_data > size:
        first = min(cut, key=lambda info: info.offset).name if cut else None
        message = f"{file} is cut short: its header needs {end_of_data:,} bytes and it has {size:,}"
        message += f", so {count(cut, ' is', ' are')} not whole." if cut else "."
        files.problems.append(Problem("error", message, file, first, f"Fetch {file} again."))
    for before, after in pairwise(sorted(entered, key=lambda info: info.offset)):
        if before.offset + before.nbytes > after.offset:
            message = f"{file}: {before.name} and {after.name} share bytes, so at least one of them is wrong."
            files.problems.append(Problem("error", message, file, after.name, f"Fetch {file} again."))
            break
    if end_of_data < size:
        message = f"{file} has {size - end_of_data:,} bytes behind its last tensor that no tensor owns."
        files.problems.append(Problem("note", message, file, fix="Harmless if the tensors are right; --verify tells."))


def _info(path: Path, data: int, name: str, entry: Any) -> TensorInfo | str:
    """The tensor, or what is wrong with its entry."""
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        whole = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole or begin > end:
        return f"has a malformed header entry, {str(entry)[:80]}"
    if dtype not in ITEM_SIZES:
        return f"has dtype {dtype[:20]!r}, expected one of {', '.join(ITEM_SIZES)}"
    if (needed := prod(shape) * ITEM_SIZES[dtype]) != end - begin:
        return f"of shape {list(shape)} in {dtype} needs {needed:,} bytes and its header gives it {end - begin:,}"
    return TensorInfo(name, dtype, shape, path, data + begin, end - begin)


def _no_weights(directory: Path, pickles: list[str]) -> Problem:
    if pickles:
        message = f"There are only pickle weights here ({pickles[0]}), which can run code when opened."
        fix = "Fetch the safetensors files of this model, or convert it with transformers' save_pretrained."
        return Problem("error", message, pickles[0], fix=fix)
    if gguf := sorted(path.name for path in directory.glob("*.gguf")):
        message = f"There is a GGUF file here ({gguf[0]}), which llama.cpp reads and Stoker does not."
        return Problem("error", message, gguf[0], fix=INSTEAD)
    return Problem("error", "There is no *.safetensors file here.", fix="Finish the download of the model.")


def _unfinished(directory: Path) -> list[Problem]:
    """What huggingface_hub leaves behind when a download into this directory was interrupted."""
    left = list(directory.glob(".cache/huggingface/download/**/*.incomplete"))
    if not left:
        return []
    message = f"{len(left)} unfinished download(s) lie in .cache/huggingface/download."
    fix = f"Run hf download REPO --local-dir {directory} again; it resumes."
    return [Problem("note", message, fix=fix)]


def count(names: Sequence[Any], one: str = "", many: str = "") -> str:
    """ "1 tensor is", "3 tensors are": a number, its noun and what follows it."""
    return f"{len(names):,} tensor{one}" if len(names) == 1 else f"{len(names):,} tensors{many}"
