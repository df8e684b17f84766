"""Which layers of a checkpoint fill which parameter of the model, in whatever format they are stored. No torch.

Published files differ in prefix (multimodal or text-only) and in how experts are stored (fused, or one by one, or
fused in the trunk and one by one in the MTP head). Whatever is left over is explained by a rule here or is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.errors import CheckpointError

if TYPE_CHECKING:  # the planner wants only the names: it need not wait for what reads files
    from stoker.weights.checkpoint import Checkpoint
    from stoker.weights.formats.rules import LayerFormat

TRUNK_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
VISION_PREFIXES = ("model.visual.", "visual.")
MTP_PREFIX = "mtp."
EXPERTS = ".mlp.experts."

Rule = Callable[[str], bool]


@dataclass(frozen=True)
class Source:
    """What fills one parameter: bands of rows, one below the other, each one layer or a stack of experts' layers."""

    bands: tuple[tuple[LayerFormat, ...], ...]
    stacked: bool  # the parameter has an expert dimension that no single layer has

    @property
    def layers(self) -> list[LayerFormat]:
        return [layer for band in self.bands for layer in band]

    @property
    def formats(self) -> set[str]:
        return {layer.format for layer in self.layers}


def map_parameters(
    parameters: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, tied_head: bool
) -> tuple[dict[str, Source], list[str]]:
    """The source of every parameter of a trunk (with or without `mtp.`), and a note per rule that left some out."""
    prefix = trunk_prefix(checkpoint)
    sources = {}
    for name, shape in parameters.items():
        if name == "lm_head.weight":
            target = next((head for head in HEAD_NAMES if _has_layer(head, checkpoint)), name)
        else:
            target = name if name.startswith(MTP_PREFIX) else prefix + name
        sources[name] = _source(target, shape, checkpoint)
    rules: dict[str, Rule] = {
        "vision tensors not used: Stoker computes text only": lambda name: name.startswith(VISION_PREFIXES),
        "rotary tables not used: they are computed": lambda name: name.endswith("rotary_emb.inv_freq"),
        "KV-cache scales not used: Stoker's cache has its own": lambda name: name.endswith((".k_scale", ".v_scale")),
    }
    if not any(name.startswith(MTP_PREFIX) for name in parameters):
        rules["MTP tensors not used: the config has no MTP head"] = lambda name: name.startswith(MTP_PREFIX)
    if tied_head:
        rules["head tensors not used: the config ties the head to the embedding"] = lambda name: name in HEAD_NAMES
    return sources, _account_for(checkpoint, sources.values(), rules)


def map_drafter(parameters: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> dict[str, Source]:
    """The source of every parameter of a DFlash drafter, whose tensors carry no prefix."""
    sources = {name: _source(name, shape, checkpoint) for name, shape in parameters.items()}
    _account_for(checkpoint, sources.values(), {})
    return sources


def trunk_prefix(checkpoint: Checkpoint) -> str:
    for prefix in TRUNK_PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint.tensors:
            return prefix
    tried = ", ".join(f"{prefix}embed_tokens.weight" for prefix in TRUNK_PREFIXES)
    raise CheckpointError(f"{checkpoint.directory} has no embedding (looked for {tried}).")


def _has_layer(name: str, checkpoint: Checkpoint) -> bool:
    return name.removesuffix(".weight") in checkpoint.formats.layers


def _source(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> Source:
    if EXPERTS in name and not _has_layer(name, checkpoint) and _has_single_experts(name, checkpoint):
        return _single_experts(name, shape, checkpoint)
    return Source(((_layer(name, shape, checkpoint),),), stacked=False)


def _has_single_experts(name: str, checkpoint: Checkpoint) -> bool:
    stem = name.rsplit(".", 1)[0]
    return any(layer.startswith(f"{stem}.") and layer[len(stem) + 1].isdigit() for layer in checkpoint.formats.layers)


def _single_experts(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> Source:
    """experts.gate_up_proj [E, 2I, H] from experts.E.gate_proj and up_proj [I, H]; down_proj [E, H, I] likewise."""
    stem, kind = name.rsplit(".", 1)
    count, rows, columns = shape
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    each = (rows // len(kinds), columns)
    bands = tuple(
        tuple(_layer(f"{stem}.{expert}.{part}.weight", each, checkpoint) for expert in range(count)) for part in kinds
    )
    for band in bands:
        other = next((layer for layer in band if layer.format != band[0].format), None)
        if other:
            raise CheckpointError(
                f"{checkpoint.directory}: {other.name} is stored in {other.format} and {band[0].name} in "
                f"{band[0].format}; the experts of a layer must share one format."
            )
    return Source(bands, stacked=True)


def _layer(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> LayerFormat:
    layer = checkpoint.formats.layers.get(name.removesuffix(".weight"))
    if layer is None:
        raise CheckpointError(_missing(name, shape, checkpoint))
    if layer.shape != shape:
        tensor = next(iter(layer.tensors.values()))
        raise CheckpointError(
            f"{checkpoint.tensors[tensor].file}: {tensor} has shape {list(layer.shape)}"
            + (f" (stored in {layer.format})" if len(layer.tensors) > 1 else "")
            + f", config.json asks for {list(shape)}."
        )
    return layer


def _missing(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> str:
    found = f"{checkpoint.directory} lacks the tensor {name} (expected shape {list(shape)})"
    if name.startswith(MTP_PREFIX):
        have = len(checkpoint.names(MTP_PREFIX))
        return (
            f"{found}: the MTP head is incomplete, only {have} of its tensors are there. "
            "Fetch the missing file, or remove all mtp.* tensors to run without drafting."
        )
    return f"{found}; fetch the missing file."


def _account_for(checkpoint: Checkpoint, sources: Iterable[Source], rules: Mapping[str, Rule]) -> list[str]:
    left = dict.fromkeys(checkpoint.tensors)
    for source in sources:
        for layer in source.layers:
            for tensor in layer.tensors.values():
                left.pop(tensor, None)
    notes = []
    for sentence, explains in rules.items():
        explained = [name for name in left if explains(name)]
        for name in explained:
            del left[name]
        if explained:
            notes.append(f"{len(explained)} {sentence}.")
    if left:
        info = checkpoint.tensors[next(iter(left))]
        raise CheckpointError(
            f"{info.file}: {info.name} {list(info.shape)} in {info.dtype} has no place in this model "
            f"({len(left)} such tensors); is config.json the right one?"
        )
    return notes
