"""Files of a checkpoint that are not weights (tokenizer, chat template, model card): which are copied, and why not."""

import fnmatch
from pathlib import Path

from stoker.checkpoint.build.workspace import write_synced
from stoker.errors import CheckpointError
from stoker.weights.checkpoint import INDEX
from stoker.weights.json_file import read_small

TAKEN = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*")
WRITTEN_ANEW = ("config.json", INDEX, "stoker.json")
# Each repeats quantization_config, which config.json has, and would no longer agree with it.
QUANTISATION_FILES = ("quantization_config.json", "quantize_config.json", "hf_quant_config.json")


def sort_files(directory: Path) -> tuple[list[Path], list[str]]:
    """The files to copy, and a line per rule that left some out."""
    taken: list[Path] = []
    lines: list[str] = []
    stale: list[str] = []
    left: list[str] = []
    for path in sorted(directory.iterdir()):
        name = path.name
        if name.startswith(".") or name in WRITTEN_ANEW or name.endswith(".safetensors"):
            continue
        if path.is_dir() and (path / "config.json").exists():
            lines.append(f"{name} not copied: a checkpoint of its own; a drafter comes along with --drafter {path}")
            continue
        if name in QUANTISATION_FILES:
            stale.append(name)
        elif path.is_file() and any(fnmatch.fnmatchcase(name, pattern) for pattern in TAKEN):
            taken.append(path)
        else:
            left.append(name)
    if stale:
        lines.append(f"{_listed(stale)} not copied: config.json says what is quantised")
    if left:
        lines.append(f"{_listed(left)} not copied: only safetensors weights, tokenizer and text files are taken")
    return taken, lines


def copy_files(files: list[Path], folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for path in files:
        try:
            data = read_small(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        write_synced(folder / path.name, data)  # a hub cache holds links: their content is copied
    return [folder / path.name for path in files]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
