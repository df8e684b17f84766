"""The checkpoints that a build reads: their layers by parameter, and what becomes of each of their tensors.

A base gives everything, a donor only some layers. Every tensor of either has a disposition, such as "copied unchanged";
a tensor without one is an error.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.formats.layout import Shape
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.headers import TensorInfo
from stoker.weights.names import OTHER, group_of, is_mtp, is_rotary_table
from stoker.weights.problems import refuse_errors
from stoker.weights.resolve import Place, Spelling


@dataclass
class Source:
    """An opened checkpoint. `names` includes tensors that a hub holds and that were not fetched."""

    option: str  # --base, --shared-experts, --mtp, --drafter
    where: str  # as the user gave it
    checkpoint: Checkpoint
    names: Collection[str]
    hub: Mapping[str, Any] = field(default_factory=dict)  # repository, revision and bytes of a fetched source
    dispositions: dict[str, str] = field(default_factory=dict)  # tensor -> what becomes of it, and why

    def __post_init__(self) -> None:
        refuse_errors(self.checkpoint.format_problems, self.checkpoint.directory)
        self._spelling = Spelling(self.checkpoint, drafter=self.option == "--drafter")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.checkpoint.tensors

    @property
    def layers(self) -> Mapping[str, LayerFormat]:
        return self.checkpoint.formats.layers

    def stored_name(self, parameter: str) -> str:
        """A parameter of the model (`layers.0.mlp.gate.weight`) as this checkpoint calls it."""
        return self._spelling.name(parameter)

    def infos(self, layer: LayerFormat) -> dict[str, TensorInfo]:
        return {suffix: self.tensors[name] for suffix, name in layer.tensors.items()}

    def find(self, parameter: str, shape: Shape) -> dict[str, LayerFormat]:
        """The layer of a parameter, or all its layers where experts are stored one by one, by plain tensor name."""
        return {place.name: self._layer(place) for place in self._spelling.find(parameter, shape).places}

    def _layer(self, place: Place) -> LayerFormat:
        layer, shape = place.layer, list(place.shape)
        if layer is None:
            raise CheckpointError(self._missing(place))
        if not place.filled:
            info = self.tensors[next(iter(layer.tensors.values()))]
            found = f"{info.file}: {info.name} is {layer.format} of shape {list(layer.shape)}"
            if self.option == "--base":
                raise CheckpointError(f"{found}, config.json asks for {shape}; one of the two is not this model's.")
            raise CheckpointError(
                f"{found}, the base needs {shape}: {self.option} {self.where} belongs to another model."
            )
        return layer

    def _missing(self, place: Place) -> str:
        found = f"{self.where} lacks the tensor {place.name} (expected shape {list(place.shape)})"
        if not is_mtp(place.name):
            return f"{found}; fetch the missing file."
        have = sum(map(is_mtp, self.names))
        return (
            f"{found}: its MTP head is incomplete, only {have:,} of its tensors are there. "
            "Name a checkpoint with a whole one: --mtp DIR or --mtp hf:REPO."
        )

    def account_for(self, names: Iterable[str], rule: str) -> None:
        for name in names:
            self.dispositions[name] = rule

    def report_unused(self, rule_for_rest: str = "") -> list[str]:
        """A line per disposition with its count. What has none gets `rule_for_rest`; without that it is an error."""
        rest: Counter[str] = Counter()
        for name in self.names:
            if name in self.dispositions:
                continue
            if not rule_for_rest or (group_of(name) == OTHER and not is_rotary_table(name)):
                self._refuse(name)
            self.dispositions[name] = rule_for_rest
            rest[group_of(name)] += 1
        counts = Counter(self.dispositions.values())
        lines = [f"{count:,} tensor{'s' if count > 1 else ''} {rule}" for rule, count in counts.items()]
        if rest:
            lines[-1] += f" ({', '.join(f'{count:,} {group}' for group, count in rest.most_common())})"
        return lines

    def _refuse(self, name: str) -> None:
        left = sum(1 for other in self.names if other not in self.dispositions)
        info = self.tensors.get(name)
        stored = f"{info.file}: {name} {list(info.shape)} in {info.dtype}" if info else f"{self.where}: {name}"
        raise CheckpointError(
            f"{stored} has no place in this model and no rule explains it ({left:,} such tensors); "
            "is the config.json of the base the right one?"
        )

    def identity(self) -> dict[str, Any]:
        """What must not change between the start of a build and its resumption."""
        if self.hub:
            return {"option": self.option, **self.hub}
        directory = self.checkpoint.directory
        files = {path.name: path for path in sorted(directory.iterdir()) if path.suffix in (".safetensors", ".json")}
        stats = {name: os.stat(path) for name, path in files.items()}
        return {
            "option": self.option,
            "path": str(directory.resolve()),
            "files": {name: {"bytes": s.st_size, "mtime_ns": s.st_mtime_ns} for name, s in stats.items()},
        }

    def origin(self) -> dict[str, Any]:
        """The entry for the manifest, with the path as the user gave it: results are copied to other machines."""
        found = self.identity()
        if not self.hub:
            found["path"] = self.where
            found["files"] = {name: {"bytes": entry["bytes"]} for name, entry in found["files"].items()}
        return found


def open_local(option: str, where: str) -> Source:
    checkpoint = Checkpoint.open(Path(where))
    return Source(option, where, checkpoint, checkpoint.tensors)
