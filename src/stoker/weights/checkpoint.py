"""A checkpoint directory: every tensor of every safetensors file, and what the index says about them. No torch.

The headers decide. An index that omits tensors (MTP heads often) is completed and that is noted; an index that
promises what the files do not hold is an error.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError
from stoker.weights.formats.layout import INSTEAD
from stoker.weights.formats.rules import FormatTable, formats_in
from stoker.weights.header import TensorInfo, read_header
from stoker.weights.json_file import read_json

INDEX = "model.safetensors.index.json"
PHRASES = "phrases.safetensors"  # no weights: a table of what the model often writes, for the lookup drafter
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    tensors: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory; give a folder with config.json and *.safetensors.")
        files = weight_files(directory)
        if not files:
            _refuse_empty(directory)
        tensors: dict[str, TensorInfo] = {}
        for file in files:
            for name, info in read_header(file).items():
                if name in tensors:
                    raise CheckpointError(
                        f"{name} is in both {tensors[name].file.name} and {file.name} of {directory}; "
                        "remove the file that does not belong."
                    )
                tensors[name] = info
        return cls(directory, tensors, _compare_with_index(directory, tensors))

    @cached_property
    def formats(self) -> FormatTable:
        """How each layer is stored. The headers decide; where config.json contradicts them, that is an error."""
        header = {name: (info.dtype, info.shape) for name, info in self.tensors.items()}
        table = formats_in(header, quantization_config(self.directory))
        if table.errors:
            first, count = table.errors[0], len(table.errors)
            place = self.tensors[first.tensor].file if first.tensor in self.tensors else self.directory / first.tensor
            raise CheckpointError(
                f"{place}: {first}"
                + (f" ({count} such layers.)" if count > 1 else "")
                + (f" {INSTEAD}" if first.unread else "")
            )
        return table

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.tensors if name.startswith(prefix)]


def weight_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.safetensors") if path.name != PHRASES)


def quantization_config(directory: Path) -> dict[str, Any] | None:
    """From config.json, its text part, or ModelOpt's own file; None where nothing is quantised."""
    path = directory / "config.json"
    raw = read_json(path) if path.exists() else {}
    text = raw.get("text_config")
    for holder in (raw, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder.get(key), dict):
                return dict(holder[key])
    path = directory / "hf_quant_config.json"
    return read_json(path) if path.exists() else None


def _refuse_empty(directory: Path) -> None:
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory} holds pickle weights ({pickles[0]}), which can run code when opened; Stoker reads only "
            "*.safetensors. Fetch the safetensors files of this model or convert it with transformers' save_pretrained."
        )
    if gguf := sorted(path.name for path in directory.glob("*.gguf")):
        raise CheckpointError(f"{directory} holds a GGUF file ({gguf[0]}), which llama.cpp reads. {INSTEAD}")
    raise CheckpointError(f"{directory} holds no *.safetensors file; was the download finished?")


def _compare_with_index(directory: Path, tensors: dict[str, TensorInfo]) -> list[str]:
    path = directory / INDEX
    if not path.exists():
        return []
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{path} has no weight_map; fetch the file again.")
    for name, file in listed.items():
        if not (directory / str(file)).exists():
            count = sum(1 for other in listed.values() if other == file)
            raise CheckpointError(f"{path} lists {count} tensors in {file}, which does not exist; fetch that file.")
        if name not in tensors:
            raise CheckpointError(f"{path} lists {name} in {file}, but no file holds it; fetch {file} again.")
        if tensors[name].file.name != file:
            raise CheckpointError(
                f"{path} lists {name} in {file}, but it lies in {tensors[name].file.name}; fetch the index again."
            )
    extra = [name for name in tensors if name not in listed]
    if not extra:
        return []
    homes = ", ".join(sorted({tensors[name].file.name for name in extra}))
    return [f"{len(extra)} tensors of {homes} are missing from the index; read all the same."]
