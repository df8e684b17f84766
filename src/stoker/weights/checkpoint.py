"""A checkpoint directory: every tensor of every safetensors file, and what the index says about them. No torch.

The headers decide. An index that omits tensors (MTP heads often) is completed and that is noted; an index that
promises what the files do not hold is an error.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError
from stoker.weights.files import INDEX, scan
from stoker.weights.formats.layout import INSTEAD
from stoker.weights.formats.rules import FormatTable, formats_in
from stoker.weights.headers import TensorInfo
from stoker.weights.json_file import read_json
from stoker.weights.problems import refuse_errors

__all__ = ["INDEX", "Checkpoint", "quantization_config"]


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    tensors: dict[str, TensorInfo]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, directory: Path) -> "Checkpoint":
        """Raises the first of the errors that `stoker inspect` would list."""
        files = scan(directory)
        refuse_errors(files.problems, directory)
        return cls(directory, files.tensors, [note.message for note in files.unlisted])

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
