"""Which tensors of a checkpoint fill which parameter of the network: found, missing, misshapen, unused and unknown.

Published files differ in prefix (multimodal or text-only) and in how experts are stored (fused, or one by one, or fused
in the trunk and one by one in the MTP head). What no parameter takes is explained by a rule here or is an error.
Loading raises the first problem, `stoker inspect` lists all, `stoker build` takes layers from `Spelling`. No torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from stoker.weights.checkpoint import Checkpoint
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.formats.layout import PLAIN_FORMATS, SUFFIXES, Shape
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.headers import TensorInfo
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import (
    EXPERTS,
    HEAD_NAMES,
    HEAD_WEIGHT,
    MTP,
    OTHER,
    SINGLE_EXPERT,
    drafter_parameters,
    group_of,
    is_cache_scale,
    is_mtp,
    is_never_quantised,
    is_rotary_table,
    is_vision,
    model_parameters,
    module_of,
    single_experts,
    trunk_prefix,
)
from stoker.weights.problems import Problem

WRONG_CONFIG = "Check that config.json belongs to these weights; if it does, fetch them again."


@dataclass(frozen=True)
class Place:
    """Where a parameter, or one expert's part of it, is looked for, and what lies there."""

    parameter: str
    name: str  # of the tensor in this checkpoint, were it stored plainly: "model.layers.0.mlp.gate.weight"
    shape: Shape  # that config.json asks for
    layer: LayerFormat | None  # None: nothing, or headers that make no sense and are reported as such
    missing: bool

    @property
    def module(self) -> str:
        return module_of(self.name)

    @property
    def filled(self) -> bool:
        return self.layer is not None and self.layer.shape == self.shape


@dataclass(frozen=True)
class Filling:
    """What fills one parameter: bands of rows, one below the other, each one layer or a stack of experts' layers."""

    bands: tuple[tuple[Place, ...], ...]
    stacked: bool  # the parameter has an expert dimension that no single layer has

    @property
    def places(self) -> list[Place]:
        """Expert by expert, as they are published."""
        return [place for expert in zip(*self.bands, strict=True) for place in expert]

    @property
    def layers(self) -> list[tuple[LayerFormat, ...]]:
        """By band; only of a parameter without problems."""
        return [tuple(place.layer for place in band if place.layer) for band in self.bands]

    @property
    def formats(self) -> set[str]:
        return {layer.format for band in self.layers for layer in band}


class Spelling:
    """What one checkpoint calls the parameters of a network, and what it holds for each."""

    def __init__(self, checkpoint: Checkpoint, drafter: bool = False) -> None:
        self._layers = checkpoint.formats.layers
        # Layers whose headers make no sense are among these; they are reported as such and are not missing.
        self._stored = set(checkpoint.tensors)
        for name in checkpoint.tensors:
            module, _, suffix = name.rpartition(".")
            if suffix in SUFFIXES:
                self._stored.add(module)
        self.prefix = "" if drafter else trunk_prefix(self._stored)
        # An MTP head may have its experts one by one where those of the trunk are fused.
        self._single_experts = any(SINGLE_EXPERT.search(module) for module in self._layers if not is_mtp(module))

    def name(self, parameter: str) -> str:
        """A parameter of the network (`layers.0.mlp.gate.weight`) as this checkpoint calls it."""
        if parameter == HEAD_WEIGHT:
            return next((name for name in HEAD_NAMES if module_of(name) in self._stored), HEAD_WEIGHT)
        return parameter if is_mtp(parameter) else self.prefix + parameter

    def find(self, parameter: str, shape: Shape) -> Filling:
        name = self.name(parameter)
        if EXPERTS in name and name not in self._stored:
            singles = single_experts(name, shape)
            # Where neither form is there, it is missed in the form that the other experts have, or that MTP heads have.
            if self._single_experts or is_mtp(name) or any(module_of(single) in self._stored for single in singles):
                places = [self._place(parameter, *single) for single in singles.items()]
                parts = len(places) // shape[0]
                return Filling(tuple(tuple(places[part::parts]) for part in range(parts)), stacked=True)
        return Filling(((self._place(parameter, name, shape),),), stacked=False)

    def _place(self, parameter: str, name: str, shape: Shape) -> Place:
        module = module_of(name)
        return Place(parameter, name, shape, self._layers.get(module), module not in self._stored)


@dataclass(frozen=True)
class Unused:
    """Layers that no parameter takes, and the rule that says why."""

    what: str
    why: str
    layers: tuple[LayerFormat, ...]

    def __str__(self) -> str:
        return f"{sum(len(layer.tensors) for layer in self.layers):,} {self.what} not used: {self.why}."


@dataclass(frozen=True)
class Resolution:
    checkpoint: Checkpoint
    fillings: Mapping[str, Filling]  # parameter -> what fills it
    unused: tuple[Unused, ...]
    unknown: tuple[LayerFormat, ...]  # no parameter takes them and no rule explains them

    @cached_property
    def places(self) -> list[Place]:
        return [place for filling in self.fillings.values() for place in filling.places]

    @cached_property
    def mtp(self) -> list[Place]:
        return [place for place in self.places if is_mtp(place.parameter)]

    @property
    def has_mtp(self) -> bool:
        """Whether anything of the MTP head that the config announces is there."""
        return any(not place.missing for place in self.mtp)

    def problems(self) -> list[Problem]:
        """Errors, and notes on what is left out. Those of `Checkpoint.format_problems` are not repeated here."""
        return [
            *self._missing(),
            *self._misshapen(),
            *self._unknown(),
            *self._notes_on_unused(),
            *self._unloadable(),
        ]

    def _missing(self) -> list[Problem]:
        missing = _by_group(place for place in self.places if place.missing)
        total = _by_group(self.places) if missing else {}
        problems = []
        for group, places in missing.items():
            counted, first = f"{len(places):,} of {len(total[group]):,} {group} tensors missing", places[0]
            message, fix = f"{counted}, first {first.name} {list(first.shape)}", "Fetch the file that holds them."
            if group != MTP:
                problems.append(Problem("error", f"{message}.", None, first.name, fix))
                continue
            graft = f"stoker build --base {self.checkpoint.directory} --mtp DIR_WITH_MTP --out NEW adds them"
            if self.has_mtp:
                have = len(total[MTP]) - len(places)
                message += f": the MTP head is incomplete, only {have:,} of its tensors are there."
                fix = (
                    f"Fetch the file that holds them, or {graft}; or remove all mtp.* tensors to run without drafting."
                )
                problems.append(Problem("error", message, None, first.name, fix))
            else:
                message = f"config.json announces an MTP head, but all {len(places):,} MTP tensors are missing."
                fix = f"It runs without MTP drafting; {graft}."
                problems.append(Problem("note", message, None, first.name, fix))
        return problems

    def _misshapen(self) -> list[Problem]:
        problems = []
        wrong = (place for place in self.places if place.layer and not place.filled)
        for group, places in _by_group(wrong).items():
            first, layer = places[0], places[0].layer
            assert layer is not None
            more = f" ({len(places):,} {group} layers have a wrong shape.)" if len(places) > 1 else ""
            stored = f" (stored as {layer.format})" if len(layer.tensors) > 1 else ""
            message = f"{self._info(layer).name} has shape {list(layer.shape)}{stored}, config.json asks for "
            problems.append(self._error(layer, f"{message}{list(first.shape)}.{more}", WRONG_CONFIG))
        return problems

    def _unknown(self) -> list[Problem]:
        groups: dict[str, list[LayerFormat]] = {}
        for layer in self.unknown:
            groups.setdefault(group_of(layer.name), []).append(layer)
        problems = []
        for group, layers in groups.items():
            info, kind = self._info(layers[0]), "unknown" if group == OTHER else group
            message = f"{len(layers):,} {kind} tensors have no place in this model, first {info.name} "
            problems.append(self._error(layers[0], f"{message}{list(info.shape)} in {info.dtype}.", WRONG_CONFIG))
        return problems

    def _notes_on_unused(self) -> list[Problem]:
        notes = []
        for unused in self.unused:
            info = self._info(unused.layers[0])
            notes.append(Problem("note", str(unused), info.file.name, info.name, "Nothing to do."))
        return notes

    def _unloadable(self) -> list[Problem]:
        """Readable, of the right shape, and still refused: quantised where only matrices of a linear layer may be, or
        the experts of one layer in several formats."""
        quantised, mixed = [], []
        for filling in self.fillings.values():
            for band in filling.layers:
                for layer in band:
                    if layer.format not in PLAIN_FORMATS.values() and is_never_quantised(layer.name):
                        quantised.append(layer)
                    if layer.format != band[0].format:
                        mixed.append(layer)
        problems = []
        for layers, reason in (
            (quantised, "which Stoker reads in 16 or 32 bit only"),
            (mixed, "unlike the first expert of its layer; the experts of a layer must share one format"),
        ):
            if layers:
                more = f" ({len(layers):,} layers alike.)" if len(layers) > 1 else ""
                message = f"{self._info(layers[0]).name} is stored as {layers[0].format}, {reason}.{more}"
                fix = "Use a release, or a stoker build, that stores it so."
                problems.append(self._error(layers[0], message, fix))
        return problems

    def _info(self, layer: LayerFormat) -> TensorInfo:
        return self.checkpoint.tensors[layer.tensors.get("weight") or next(iter(layer.tensors.values()))]

    def _error(self, layer: LayerFormat, message: str, fix: str) -> Problem:
        info = self._info(layer)
        return Problem("error", message, info.file.name, info.name, fix)


def resolve_model(config: ModelConfig, checkpoint: Checkpoint) -> Resolution:
    """The trunk and, where the config has one, the MTP head."""
    rules: list[tuple[str, str, Callable[[str], bool]]] = [
        ("vision tensors", "Stoker computes text only", is_vision),
        ("rotary tables", "they are computed", is_rotary_table),
        ("KV-cache scales", "Stoker's cache has its own", is_cache_scale),
    ]
    if not config.mtp_layers:
        rules.append(("MTP tensors", "config.json has no MTP head (mtp_num_hidden_layers)", is_mtp))
    if config.tie_word_embeddings:
        heads = [module_of(name) for name in HEAD_NAMES]
        rules.append(("head tensors", "config.json ties the head to the embedding", heads.__contains__))
    return _resolve(model_parameters(config), checkpoint, Spelling(checkpoint), rules)


def resolve_drafter(config: DFlashConfig, checkpoint: Checkpoint) -> Resolution:
    return _resolve(drafter_parameters(config), checkpoint, Spelling(checkpoint, drafter=True), [])


def _resolve(
    parameters: Mapping[str, Shape],
    checkpoint: Checkpoint,
    spelling: Spelling,
    rules: Iterable[tuple[str, str, Callable[[str], bool]]],
) -> Resolution:
    fillings = {name: spelling.find(name, shape) for name, shape in parameters.items()}
    taken = {place.module for filling in fillings.values() for place in filling.places}
    left = [layer for module, layer in checkpoint.formats.layers.items() if module not in taken]
    unused = []
    for what, why, explains in rules:
        if explained := tuple(layer for layer in left if explains(layer.name)):
            unused.append(Unused(what, why, explained))
            left = [layer for layer in left if not explains(layer.name)]
    return Resolution(checkpoint, fillings, tuple(unused), tuple(left))


def _by_group(places: Iterable[Place]) -> dict[str, list[Place]]:
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(group_of(place.name), []).append(place)
    return groups
