"""Which format is a layer stored in? Read from the safetensors headers, then compared with the config.

The headers decide, and the config has to agree. File names do not matter. Plain Python, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from stoker.errors import CheckpointError
from stoker.weights.formats import FORMATS
from stoker.weights.formats.layout import FP8_BLOCK, PLAIN_FORMATS, SUFFIXES, Parts, Shape, UnreadFormat, identify
from stoker.weights.formats.quant_config import PLAIN, Expectation, Rules, rules_of
from stoker.weights.headers import ITEM_SIZES

Header = Mapping[str, tuple[str, Shape]]  # tensor name -> (dtype, shape)

# Fused experts have no ".weight": the tensor is named like the module, and its scale has a suffix of its own.
FUSED_SCALE = "_scale_inv"


@dataclass(frozen=True)
class LayerFormat:
    """How one layer's weight is stored."""

    name: str  # module name: "model.language_model.layers.0.mlp.gate"
    format: str  # a name from FORMATS
    shape: Shape  # logical, [.., out, in]
    tensors: Mapping[str, str]  # suffix, as the format class wants it -> tensor name
    nbytes: int


@dataclass(frozen=True)
class Finding:
    """The headers contradict themselves or the config. An error where one of them must be wrong; a note where
    the config's default merely does not list the layer (routers and convolutions are never quantised)."""

    tensor: str
    expected: str
    found: str
    rule: str  # in the config; empty if the headers contradict themselves
    severity: Literal["error", "note"] = "error"
    unread: bool = False  # the files are whole, but Stoker does not read their format

    def __str__(self) -> str:
        if not self.rule:
            return self.found
        if self.unread:
            return f"{self.tensor}: quantization_config says {self.expected} ({self.rule}), which Stoker does not read."
        return f"{self.tensor}: quantization_config says {self.expected} ({self.rule}), the file has {self.found}."


@dataclass(frozen=True)
class FormatTable:
    layers: Mapping[str, LayerFormat]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "error")


def formats_in(header: Header, quantization_config: Mapping[str, Any] | None = None) -> FormatTable:
    """Every layer of a checkpoint; what cannot be read becomes a finding, never an exception."""
    modules: dict[str, list[str]] = {}
    for tensor in header:
        modules.setdefault(split_name(tensor, header)[0], []).append(tensor)
    layers: dict[str, LayerFormat] = {}
    findings: list[Finding] = []
    rules: Rules | None = None  # None: the config cannot be read, so nothing is compared with it
    try:
        rules = rules_of(quantization_config, list(modules))
    except CheckpointError as error:
        findings.append(_failure("config.json", "a known quantization_config", error))
    for module, tensors in modules.items():
        try:
            layer = _layer(module, tensors, header)
        except CheckpointError as error:
            findings.append(_failure(tensors[0], "a known format", error))
            continue
        layers[module] = layer
        try:
            finding = _compare(layer, rules) if rules else None
        except CheckpointError as error:
            finding, rules = _failure("config.json", "a known quantization_config", error), None
        if finding:
            findings.append(finding)
    return FormatTable(layers, tuple(findings))


def _failure(place: str, expected: str, error: CheckpointError) -> Finding:
    return Finding(place, expected, str(error), rule="", unread=isinstance(error, UnreadFormat))


def split_name(tensor: str, header: Header) -> tuple[str, str]:
    """Module and suffix. A tensor without a known suffix is the weight of a module of the same name."""
    module, _, suffix = tensor.rpartition(".")
    if suffix in SUFFIXES and module:
        return module, suffix
    fused = tensor.removesuffix(FUSED_SCALE)
    if fused != tensor and fused in header:
        return fused, f"weight{FUSED_SCALE}"
    return tensor, "weight"


def _layer(module: str, tensors: list[str], header: Header) -> LayerFormat:
    by_suffix: dict[str, str] = {}
    for tensor in tensors:
        suffix = split_name(tensor, header)[1]
        if suffix in by_suffix:
            raise CheckpointError(f"{module} is stored twice, as {by_suffix[suffix]} and as {tensor}.")
        by_suffix[suffix] = tensor
    parts = {suffix: (header[tensor][0], tuple(header[tensor][1])) for suffix, tensor in by_suffix.items()}
    # compressed-tensors calls the scales of 128x128 blocks weight_scale, like all others
    if parts.get("weight", ("",))[0] == "F8_E4M3" and _has_block_scales(parts):
        by_suffix["weight_scale_inv"] = by_suffix.pop("weight_scale")
        parts["weight_scale_inv"] = parts.pop("weight_scale")
    found = identify(parts, module)
    nbytes = sum(ITEM_SIZES[dtype] * prod(shape) for dtype, shape in parts.values())
    return LayerFormat(module, found.format, found.shape, by_suffix, nbytes)


def _has_block_scales(parts: Parts) -> bool:
    scale, shape = parts.get("weight_scale", ("", ()))[1], parts["weight"][1]
    blocks = (*shape[:-2], *(-(-n // FP8_BLOCK) for n in shape[-2:]))
    return len(scale) == len(shape) > 1 and scale == blocks and scale != (*shape[:-1], 1)


def _compare(layer: LayerFormat, rules: Rules) -> Finding | None:
    expectation = rules(layer.name)
    found = _plain_or_name(layer.format)
    if found == expectation.format or (found == PLAIN and len(layer.shape) < 2):
        return None
    return Finding(
        next(iter(layer.tensors.values())),
        expectation.format,
        layer.format,
        expectation.rule,
        _severity(expectation, layer.format),
        unread=expectation.format != PLAIN and expectation.format not in FORMATS,
    )


def _plain_or_name(format_name: str) -> str:
    return PLAIN if format_name in PLAIN_FORMATS.values() else format_name


def _severity(expectation: Expectation, found: str) -> Literal["error", "note"]:
    if PLAIN not in (expectation.format, _plain_or_name(found)):
        return "error"
    return "error" if expectation.named and found != expectation.hybrid else "note"
