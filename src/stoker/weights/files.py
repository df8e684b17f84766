"""What lies in a checkpoint directory, and whether headers, sizes and index agree. No torch, no values.

Every file is read as far as it makes sense and each fault becomes a `Problem`; `checkpoint` raises the first error.
"""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError, StokerError, brief
from stoker.weights.formats.layout import INSTEAD
from stoker.weights.groups import MTP, group_of
from stoker.weights.headers import Reads, TensorInfo, scan_header
from stoker.weights.json_file import KINDS, MAX_JSON, read_json
from stoker.weights.problems import Problem, count

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TEXT = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # what tokenizers and templates are read from
READ_BY_US = ("config.json", "generation_config.json", INDEX)  # these say themselves what is wrong with them
MOST_ALIKE = 10  # problems of one kind that are listed one by one


@dataclass
class Files:
    """The safetensors files of a directory. `tensors` has the first copy of each name, cut-short ones included."""

    directory: Path
    sizes: dict[str, int] = field(default_factory=dict)  # bytes per file
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    readable: set[str] = field(default_factory=set)  # files whose header could be read
    cut: set[str] = field(default_factory=set)  # tensors whose bytes are not all there
    problems: list[Problem] = field(default_factory=list)
    unlisted: list[Problem] = field(default_factory=list)  # of these: notes on tensors that the index leaves out


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def scan(directory: Path, reads: Reads | None = None) -> Files:
    """Raises only where there is nothing to look at."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give a folder with config.json and *.safetensors.")
    try:
        os.listdir(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be listed: {error.strerror}.") from None
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
    files.problems += odd_files(directory)
    _compare_with_index(files)
    return files


def odd_files(directory: Path) -> list[Problem]:
    """Tokenizer and template files that reading would hang on, such as named pipes, or that are far too large."""
    problems = []
    for path in [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]:
        if path.suffix not in TEXT or path.name in READ_BY_US:
            continue
        try:
            found = path.stat()
        except OSError:  # a link to nowhere, which is missed as a file that does not exist
            continue
        kind = next((name for is_kind, name in KINDS.items() if is_kind(found.st_mode)), "")
        if kind and not stat.S_ISDIR(found.st_mode):
            message = f"{path.name} cannot be read: it is {kind}, expected a file."
            problems.append(Problem("error", message, path.name, fix=f"Remove it, or fetch {path.name} again."))
        elif stat.S_ISREG(found.st_mode) and found.st_size > MAX_JSON:
            message = f"{path.name} has {found.st_size:,} bytes, and at most {MAX_JSON:,} are read."
            problems.append(Problem("error", message, path.name, fix=f"Remove it, or fetch {path.name} again."))
    return sorted(problems, key=lambda problem: problem.message)


def _compare_with_index(files: Files) -> None:
    """The index against the headers: missing files, tensors that are absent, elsewhere, or not listed."""
    path = files.directory / INDEX
    if not path.exists() and not path.is_symlink():
        if len(files.sizes) > 1:
            message = f"There is no {INDEX} beside {len(files.sizes)} safetensors files."
            fix = f"Stoker reads every file all the same; other engines need {INDEX}, so fetch it."
            files.problems.append(Problem("note", message, INDEX, fix=fix))
        return
    try:
        listed = read_json(path).get("weight_map")
    except StokerError as error:
        files.problems.append(Problem("error", str(error), INDEX, fix="Fetch the index again."))
        return
    if not isinstance(listed, dict):
        files.problems.append(Problem("error", f"{INDEX} has no weight_map.", INDEX, fix="Fetch the index again."))
        return
    files.unlisted = _unlisted(files, listed)
    files.problems += [*_promised(files, listed), *files.unlisted]


def _promised(files: Files, listed: dict[str, Any]) -> list[Problem]:
    by_file: dict[str, list[str]] = {}
    for name, file in listed.items():
        by_file.setdefault(file if isinstance(file, str) else brief(file), []).append(name)
    missing = sorted(file for file in by_file if file not in files.sizes)
    problems = []
    for file in missing[:MOST_ALIKE]:
        more = f" ({len(missing):,} such files)" if len(missing) > MOST_ALIKE else ""
        message = f"{INDEX} lists {count(by_file[file])} in {file}, which does not exist{more}."
        problems.append(Problem("error", message, INDEX, by_file[file][0], f"Fetch {file}."))
    for file in sorted(files.readable & by_file.keys()):  # of an unreadable one enough has been said
        problems += _compare_file(file, by_file[file], files)
    return problems


def _compare_file(file: str, names: list[str], files: Files) -> list[Problem]:
    absent = [name for name in names if name not in files.tensors]
    elsewhere: dict[str, list[str]] = {}
    for name in names:
        if name in files.tensors and (home := files.tensors[name].file.name) != file:
            elsewhere.setdefault(home, []).append(name)
    problems = []
    if absent:
        message = f"{INDEX} lists {count(absent)} in {file} that no file holds, first {absent[0]}."
        problems.append(Problem("error", message, INDEX, absent[0], f"Fetch {file} and the index again."))
    for home, moved in elsewhere.items():
        message = f"{INDEX} lists {count(moved)} in {file} that belong to {home}, first {moved[0]}."
        problems.append(Problem("error", message, INDEX, moved[0], "Fetch the index again."))
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


def _scan_file(path: Path, files: Files, reads: Reads | None) -> None:
    file, header = path.name, scan_header(path, reads)
    files.sizes[file] = header.size
    if header.readable:
        files.readable.add(file)
    doubles: dict[str, list[str]] = {}
    for name, info in header.tensors.items():
        if name in files.tensors:
            doubles.setdefault(files.tensors[name].file.name, []).append(name)
        else:
            files.tensors[name] = info
    files.cut |= {name for name in header.cut if files.tensors[name].file == path}
    files.problems += header.problems
    for other, names in doubles.items():
        message = f"{count(names, ' is', ' are')} in both {other} and {file}, first {names[0]}."
        fix = f"Remove {file} if it is left over from a merge or a conversion, else {other}."
        files.problems.append(Problem("error", message, file, names[0], fix))


def _no_weights(directory: Path, pickles: list[str]) -> Problem:
    if pickles:
        message = f"There are only pickle weights here ({pickles[0]}), which can run code when opened."
        fix = "Fetch the safetensors files of this model, or convert it with transformers' save_pretrained."
        return Problem("error", message, pickles[0], fix=fix)
    if gguf := sorted(path.name for path in directory.glob("*.gguf")):
        message = f"There is a GGUF file here ({gguf[0]}), which llama.cpp reads and Stoker does not."
        return Problem("error", message, gguf[0], fix=INSTEAD)
    return Problem("error", "There is no *.safetensors file here.", fix="Finish the download of the model.")


def _unfinished(directory: Path) -> Iterable[Problem]:
    """What huggingface_hub leaves behind when a download into this directory was interrupted."""
    left = list(directory.glob(".cache/huggingface/download/**/*.incomplete"))
    if left:
        message = f"{len(left)} unfinished download(s) lie in .cache/huggingface/download."
        fix = f"Run hf download REPO --local-dir {directory} again; it resumes."
        yield Problem("note", message, fix=fix)
