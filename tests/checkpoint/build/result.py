"""What a built directory holds, for tests to compare."""

import hashlib
from pathlib import Path

from torch import Tensor

from stoker.weights.checkpoint import Checkpoint
from stoker.weights.formats import format_class
from stoker.weights.formats.base import WeightFormat
from stoker.weights.reader import read_tensor


def bytes_of(directory: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def weight(source: Checkpoint | Path | str, module: str) -> WeightFormat:
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(Path(source))
    layer = checkpoint.formats.layers[module]
    tensors = {suffix: read_tensor(checkpoint.tensors[name]) for suffix, name in layer.tensors.items()}
    return format_class(layer.format).from_tensors(tensors, module)


def tensor(source: Checkpoint | Path | str, name: str) -> Tensor:
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(Path(source))
    return read_tensor(checkpoint.tensors[name])


def formats(directory: Path | str) -> dict[str, str]:
    """Module -> format; a single finding, notes included, fails."""
    table = Checkpoint.open(Path(directory)).formats
    assert not table.findings, [str(finding) for finding in table.findings]
    return {name: layer.format for name, layer in table.layers.items()}
