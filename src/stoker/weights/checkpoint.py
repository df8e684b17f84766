"""A checkpoint directory: every tensor of its safetensors files, how each layer is stored, and what is wrong with it.

The headers decide. Every file is read as far as it makes sense and each fault becomes a `Problem`: `Checkpoint.scan`
collects them for `stoker inspect`, `Checkpoint.open` raises the first error. No torch, no values.
"""

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError, StokerError, brief
from stoker.weights.formats.layout import INSTEAD
from stoker.weights.formats.rules import Finding, FormatTable, formats_in
from stoker.weights.headers import Reads, TensorInfo, scan_header
from stoker.weights.json_file import KINDS, MAX_JSON, read_json
from stoker.weights.names import group_of, is_mtp
from stoker.weights.problems import Problem, count, refuse_errors

INDEX = "model.safetensors.index.json"
MODELOPT = "hf_quant_config.json"  # ModelOpt's own quantization_config
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TEXT = (".json", ".jinja", ".txt", ".model", ".tiktoken")  # what tokenizers and templates are read from
READ_BY_US = ("config.json", "generation_config.json", INDEX)  # problems with these are reported by whoever reads them
MOST_ALIKE = 10  # problems of one kind that are listed one by one


@dataclass
class Checkpoint:
    """`tensors` has the first copy of each name, including tensors of truncated files."""

    directory: Path
    sizes: dict[str, int] = field(default_factory=dict)  # bytes per safetensors file
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    readable: set[str] = field(default_factory=set)  # files whose header could be read
    cut: set[str] = field(default_factory=set)  # tensors whose bytes are not all there
    problems: list[Problem] = field(default_factory=list)
    unlisted: list[Problem] = field(default_factory=list)  # of these: notes on tensors that the index leaves out

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Raises the first error that `stoker inspect` would list, except those of `formats`."""
        checkpoint = cls.scan(directory)
        refuse_errors(checkpoint.problems, directory)
        return checkpoint

    @classmethod
    def scan(cls, directory: Path, reads: Reads | None = None) -> "Checkpoint":
        """Raises only if `directory` cannot be listed."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory; give a folder with config.json and *.safetensors.")
        try:
            os.listdir(directory)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be listed: {error.strerror}.") from None
        checkpoint = cls(directory)
        for path in sorted(directory.glob("*.safetensors")):
            _scan_file(path, checkpoint, reads)
        pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if not checkpoint.sizes:
            checkpoint.problems.append(_no_weights(directory, pickles))
        elif pickles:
            checkpoint.problems.append(
                Problem(
                    "note",
                    f"{len(pickles)} pickle file(s), first {pickles[0]}, can run code when opened and are never read.",
                    file=pickles[0],
                    fix="Delete them unless something else needs them.",
                )
            )
        checkpoint.problems += _unfinished(directory)
        checkpoint.problems += odd_files(directory)
        _compare_with_index(checkpoint)
        return checkpoint

    @cached_property
    def formats(self) -> FormatTable:
        """How each layer is stored, and where headers and quantization_config contradict each other."""
        header = {name: (info.dtype, info.shape) for name, info in self.tensors.items()}
        try:
            quantization = quantization_config(self.directory)
        except StokerError:  # `format_problems` or the reader of config.json reports it
            quantization = None
        return formats_in(header, quantization)

    @cached_property
    def format_problems(self) -> list[Problem]:
        """The findings of `formats`, similar ones as one problem: a wrong config.json may cause thousands."""
        alike: dict[tuple[str, ...], list[Finding]] = {}
        for finding in self.formats.findings:
            kind = "" if finding.severity == "note" else group_of(finding.tensor)
            stored = re.sub(r"\d+", "#", finding.found) if not finding.rule else finding.found
            alike.setdefault((finding.severity, kind, finding.expected, stored), []).append(finding)
        problems = [self._format_problem(found) for found in alike.values()]
        try:
            quantization_config(self.directory)
        except StokerError as error:
            if MODELOPT in str(error):  # a broken config.json is reported by whoever reads all of it
                problems.append(Problem("error", str(error), MODELOPT, fix="Fetch the file again."))
        return problems

    def _format_problem(self, found: list[Finding]) -> Problem:
        first = found[0]
        info = self.tensors.get(first.tensor)
        file, tensor = (info.file.name, info.name) if info else (first.tensor, None)
        if first.severity == "error":
            more = f" ({len(found):,} layers alike.)" if len(found) > 1 else ""
            fix = f"Fetch {file} and config.json again; if it stays so, they are of different releases."
            fix = "Fetch config.json again." if file == "config.json" else fix
            fix = INSTEAD if first.unread else fix
            return Problem("error", f"{first}{more}", file, tensor, fix)
        # Routers and convolutions are never quantised, and no release lists them: one sentence for all.
        groups = ", ".join(dict.fromkeys(group_of(finding.tensor) for finding in found))
        message = (
            f"{len(found):,} layer{'s are' if len(found) > 1 else ' is'} stored as {first.found} where "
            f"quantization_config says {first.expected} ({first.rule}): {groups}, first {first.tensor}."
        )
        return Problem("note", message, file, tensor, "Nothing to do: the headers decide.")


def quantization_config(directory: Path) -> dict[str, Any] | None:
    """From config.json, its text part, or ModelOpt's own file; None where nothing is quantised."""
    path = directory / "config.json"
    raw = read_json(path) if path.exists() else {}
    text = raw.get("text_config")
    for holder in (raw, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), dict):
                return dict(holder[key])
    path = directory / MODELOPT
    return read_json(path) if path.exists() else None


def odd_files(directory: Path) -> list[Problem]:
    """Tokenizer and template files that cannot be read safely: named pipes, devices, or far too large files."""
    problems = []
    for path in [*directory.iterdir(), *directory.glob("additional_chat_templates/*")]:
        if path.suffix not in TEXT or path.name in READ_BY_US:
            continue
        try:
            found = path.stat()
        except OSError:  # a dangling link, which is reported as a missing file
            continue
        kind = next((name for is_kind, name in KINDS.items() if is_kind(found.st_mode)), "")
        if kind and not stat.S_ISDIR(found.st_mode):
            message = f"{path.name} cannot be read: it is {kind}, expected a file."
            problems.append(Problem("error", message, path.name, fix=f"Remove it, or fetch {path.name} again."))
        elif stat.S_ISREG(found.st_mode) and found.st_size > MAX_JSON:
            message = f"{path.name} has {found.st_size:,} bytes, and at most {MAX_JSON:,} are read."
            problems.append(Problem("error", message, path.name, fix=f"Remove it, or fetch {path.name} again."))
    return sorted(problems, key=lambda problem: problem.message)


def _compare_with_index(checkpoint: Checkpoint) -> None:
    """The index against the headers: missing files, tensors that are absent, elsewhere, or not listed."""
    path = checkpoint.directory / INDEX
    if not path.exists() and not path.is_symlink():
        if len(checkpoint.sizes) > 1:
            message = f"There is no {INDEX} beside {len(checkpoint.sizes)} safetensors files."
            fix = f"Stoker reads every file all the same; other engines need {INDEX}, so fetch it."
            checkpoint.problems.append(Problem("note", message, INDEX, fix=fix))
        return
    try:
        listed = read_json(path).get("weight_map")
    except StokerError as error:
        checkpoint.problems.append(Problem("error", str(error), INDEX, fix="Fetch the index again."))
        return
    if not isinstance(listed, dict):
        checkpoint.problems.append(Problem("error", f"{INDEX} has no weight_map.", INDEX, fix="Fetch the index again."))
        return
    checkpoint.unlisted = _unlisted(checkpoint, listed)
    checkpoint.problems += [*_promised(checkpoint, listed), *checkpoint.unlisted]


def _promised(checkpoint: Checkpoint, listed: dict[str, Any]) -> list[Problem]:
    by_file: dict[str, list[str]] = {}
    for name, file in listed.items():
        by_file.setdefault(file if isinstance(file, str) else brief(file), []).append(name)
    missing = sorted(file for file in by_file if file not in checkpoint.sizes)
    problems = []
    for file in missing[:MOST_ALIKE]:
        more = f" ({len(missing):,} such files)" if len(missing) > MOST_ALIKE else ""
        message = f"{INDEX} lists {count(by_file[file])} in {file}, which does not exist{more}."
        problems.append(Problem("error", message, INDEX, by_file[file][0], f"Fetch {file}."))
    for file in sorted(checkpoint.readable & by_file.keys()):  # an unreadable file has been reported already
        problems += _compare_file(file, by_file[file], checkpoint)
    return problems


def _compare_file(file: str, names: list[str], checkpoint: Checkpoint) -> list[Problem]:
    absent = [name for name in names if name not in checkpoint.tensors]
    elsewhere: dict[str, list[str]] = {}
    for name in names:
        if name in checkpoint.tensors and (home := checkpoint.tensors[name].file.name) != file:
            elsewhere.setdefault(home, []).append(name)
    problems = []
    if absent:
        message = f"{INDEX} lists {count(absent)} in {file} that no file holds, first {absent[0]}."
        problems.append(Problem("error", message, INDEX, absent[0], f"Fetch {file} and the index again."))
    for home, moved in elsewhere.items():
        message = f"{INDEX} lists {count(moved)} in {file} that belong to {home}, first {moved[0]}."
        problems.append(Problem("error", message, INDEX, moved[0], "Fetch the index again."))
    return problems


def _unlisted(checkpoint: Checkpoint, listed: dict[str, Any]) -> list[Problem]:
    extra: dict[str, list[str]] = {}
    for name, info in checkpoint.tensors.items():
        if name not in listed:
            extra.setdefault(info.file.name, []).append(name)
    problems = []
    for file, names in extra.items():
        mtp = sum(is_mtp(name) for name in names)
        of = f" of {file}" + (f" ({mtp:,} of them MTP)" if mtp else "")
        fix = "Stoker reads them all the same; engines that follow the index need them listed"
        fix += f": stoker build --base {checkpoint.directory} --out NEW writes a whole index."
        message = f"{count(names, f'{of} is', f'{of} are')} missing from {INDEX}, first {names[0]}."
        problems.append(Problem("note", message, file, names[0], fix))
    return problems


def _scan_file(path: Path, checkpoint: Checkpoint, reads: Reads | None) -> None:
    file, header = path.name, scan_header(path, reads)
    checkpoint.sizes[file] = header.size
    if header.readable:
        checkpoint.readable.add(file)
    doubles: dict[str, list[str]] = {}
    for name, info in header.tensors.items():
        if name in checkpoint.tensors:
            doubles.setdefault(checkpoint.tensors[name].file.name, []).append(name)
        else:
            checkpoint.tensors[name] = info
    checkpoint.cut |= {name for name in header.cut if checkpoint.tensors[name].file == path}
    checkpoint.problems += header.problems
    for other, names in doubles.items():
        message = f"{count(names, ' is', ' are')} in both {other} and {file}, first {names[0]}."
        fix = f"Remove {file} if it is left over from a merge or a conversion, else {other}."
        checkpoint.problems.append(Problem("error", message, file, names[0], fix))


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
