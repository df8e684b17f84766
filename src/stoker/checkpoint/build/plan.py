"""The plan of a build: which units make the result, and what becomes of every tensor of every source. No torch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from stoker.checkpoint.build.options import FP8, BuildOptions
from stoker.checkpoint.build.sources import Source
from stoker.checkpoint.build.units import (
    PLAIN_DTYPES,
    Convert,
    Out,
    Rows,
    Unit,
    copies,
    flat_rows,
    outputs_of,
    unfit,
    whole,
)
from stoker.errors import CheckpointError
from stoker.weights.formats.layout import Shape
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import (
    DENSE,
    EXPERTS,
    HEAD_NAMES,
    HEAD_WEIGHT,
    ROUTED,
    SHARED,
    group_of,
    is_cache_scale,
    is_mtp,
    is_projection,
    is_published_in_fp32,
    is_rotary_table,
    is_vision,
    model_parameters,
    module_of,
    part_of,
    single_experts,
)

COPIED = "copied unchanged"


@dataclass
class Plan:
    config: ModelConfig  # of the result
    units: list[Unit] = field(default_factory=list)
    mtp: list[Rows] = field(default_factory=list)  # matrices of the MTP head of the result
    replaced: list[tuple[Rows, Rows]] = field(default_factory=list)  # a replaced layer and its replacement

    @property
    def header(self) -> dict[str, tuple[str, Shape]]:
        return header_of(self.units)


def header_of(units: Iterable[Unit]) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of every tensor that the units write."""
    return {out.name: (out.dtype, out.shape) for unit in units for out in unit.outputs}


@dataclass(frozen=True)
class Sources:
    base: Source
    shared_experts: Source | None = None
    mtp: Source | None = None
    drafter: Source | None = None

    def all(self) -> list[Source]:
        return [s for s in (self.base, self.shared_experts, self.mtp, self.drafter) if s]


def make_plan(options: BuildOptions, config: ModelConfig, sources: Sources) -> Plan:
    return _Planner(options, config, sources).plan()


class _Planner:
    def __init__(self, options: BuildOptions, config: ModelConfig, sources: Sources) -> None:
        self.options, self.config, self.sources = options, config, sources
        self.base, self.scheme = sources.base, options.scheme
        self.made = Plan(config)

    def plan(self) -> Plan:
        head = self._mtp_source()
        if self.scheme.drafts and not head and not self.sources.drafter:
            raise CheckpointError(
                f"--draft-weights {self.options.draft_weights}: the base has no MTP head and no drafter is added, so "
                "there is nothing to quantise; give --mtp or --drafter, or leave it out."
            )
        if (
            head and not self.config.mtp_layers
        ):  # the config does not announce the head: keep it and complete the config
            self.config = self.made.config = replace(self.config, mtp_layers=1)
        self._explain_base()
        for parameter, shape in model_parameters(self.config).items():
            if is_mtp(parameter):
                if head:
                    self._parameter(parameter, shape, head)
                continue
            donor = self.sources.shared_experts
            self._parameter(parameter, shape, donor if donor and group_of(parameter) == SHARED else self.base)
        self._beside_the_model()
        return self.made

    def _mtp_source(self) -> Source | None:
        if self.sources.mtp:
            if self.config.family == "qwen3_moe":
                raise CheckpointError("--mtp: the base is a Qwen3 MoE model, which has no MTP head to fill.")
            if not any(map(is_mtp, self.sources.mtp.names)):
                raise CheckpointError(f"--mtp {self.sources.mtp.where} has no mtp.* tensors.")
            return self.sources.mtp
        has_own = self.config.family != "qwen3_moe" and any(map(is_mtp, self.base.names))
        return self.base if has_own else None

    def _explain_base(self) -> None:
        """Dispositions of the base's tensors that no unit reads."""
        if donor := self.sources.mtp:
            self.base.account_for(filter(is_mtp, self.base.names), f"replaced: the MTP head comes from {donor.where}")
        if donor := self.sources.shared_experts:
            if self.config.moe is None or not self.config.moe.shared_intermediate_size:
                raise CheckpointError("--shared-experts: the base has no shared experts to replace.")
            shared = [name for name in self.base.names if group_of(name) == SHARED]
            self.base.account_for(shared, f"replaced: shared experts come from {donor.where}")
        if self.config.tie_word_embeddings:
            if self.scheme.head and self.options.lm_head:
                raise CheckpointError(
                    "--lm-head int8: config.json ties the head to the embedding (tie_word_embeddings), so there is "
                    "no head of its own to quantise; leave --lm-head out."
                )
            tied = [name for name in self.base.names if name in HEAD_NAMES]
            self.base.account_for(tied, "not used: config.json ties the head to the embedding")
        rotary = filter(is_rotary_table, self.base.names)
        self.base.account_for(rotary, "not used: rotary tables are computed")

    def _parameter(self, parameter: str, shape: Shape, source: Source) -> None:
        found = source.find(parameter, shape)
        if source is self.sources.shared_experts:
            self._check_donated(parameter, shape, found, source)
        if is_mtp(parameter) and len(shape) > 1:
            self.made.mtp += [whole(layer, source.infos(layer))[0] for layer in found.values()]
        if self.options.to:
            self._export(parameter, shape, found, source)
        elif target := self._target(parameter):
            self._quantize(parameter, shape, found, source, target)
        else:
            for name, layer in found.items():
                self._copy(layer, source, self._out_name(parameter, name, source))

    def _out_name(self, parameter: str, stored: str, source: Source) -> str:
        return self.base.stored_name(parameter) if source is self.sources.shared_experts else stored

    def _target(self, parameter: str) -> str:
        """The format that the options ask for a parameter; empty: the one it has."""
        group = group_of(parameter)
        if parameter == HEAD_WEIGHT:
            return self.scheme.head
        if group == SHARED:
            return "" if self.sources.shared_experts else self.scheme.shared_experts
        projection = is_projection(parameter)
        if is_mtp(parameter):
            if self.scheme.drafts and part_of(parameter) == SHARED:
                return "fp8-b128"
            return self.scheme.drafts if projection or EXPERTS in parameter else ""
        return self.scheme.projections if projection or group in (ROUTED, DENSE) else ""

    def _copy(self, layer: LayerFormat, source: Source, name: str, rule: str = COPIED) -> None:
        renamed = {suffix: _renamed(stored, layer, name) for suffix, stored in layer.tensors.items()}
        self.made.units += copies(source.infos(layer), renamed)
        source.account_for(layer.tensors.values(), rule)

    def _check_donated(self, parameter: str, shape: Shape, found: Mapping[str, LayerFormat], source: Source) -> None:
        for layer in found.values():
            if layer.format != "fp8-b128" and not self.options.to:
                raise CheckpointError(
                    f"{source.where}: {layer.name} is stored in {layer.format}; --shared-experts takes FP8 in blocks "
                    "of 128x128. To quantise the shared experts of the base, give --shared-experts fp8."
                )
            stored = self.base.layers.get(module_of(self.base.stored_name(parameter)))
            if stored and stored.shape == shape:
                ours, theirs = self.base.infos(stored), source.infos(layer)
                self.made.replaced.append((whole(stored, ours)[0], whole(layer, theirs)[0]))

    def _quantize(
        self, parameter: str, shape: Shape, found: Mapping[str, LayerFormat], source: Source, target: str
    ) -> None:
        formats = {layer.format for layer in found.values()}
        if formats == {target}:
            for name, layer in found.items():
                self._copy(layer, source, name, f"copied unchanged: already {target}")
            return
        if other := formats - PLAIN_DTYPES.keys():
            option = self._option(parameter)
            raise CheckpointError(
                f"{source.where}: {next(iter(found.values())).name} is stored in {other.pop()}, and {option} starts "
                f"from 16-bit weights; use the BF16 release as --base, or leave {option} out."
            )
        singles = list(_single_matrices(parameter, shape, found, source))
        if reason := next((why for _, size, _ in singles if (why := unfit(size, target))), ""):
            if EXPERTS in parameter:  # no engine runs a layer whose experts are half INT4 and half 16 bit
                raise CheckpointError(
                    f"{source.where}: {singles[0][0]} {list(singles[0][1])} cannot be {target}: {reason}; choose a "
                    "smaller group, such as --quantize int4-g64."
                )
            for name, layer in found.items():
                self._copy(layer, source, name, f"kept in 16 bit: not {target}, {reason}")
            return
        for name, size, rows in singles:
            self.made.units.append(Convert((rows,), target, outputs_of(name, size, target)))
        for layer in found.values():
            source.account_for(layer.tensors.values(), f"quantised to {target}")

    def _option(self, parameter: str) -> str:
        if is_mtp(parameter):
            return f"--draft-weights {self.options.draft_weights}"
        if parameter == HEAD_WEIGHT and self.options.lm_head:
            return f"--lm-head {self.options.lm_head}"
        if group_of(parameter) == SHARED and self.options.shared_experts == FP8:
            return "--shared-experts fp8"
        return f"--quantize {self.options.quantize}"

    def _export(self, parameter: str, shape: Shape, found: Mapping[str, LayerFormat], source: Source) -> None:
        """Writes the trunk's experts fused, as Qwen3.5 publishes BF16; Qwen3 MoE and the MTP head keep single ones."""
        if EXPERTS in parameter and not is_mtp(parameter):
            if self.config.family == "qwen3_moe":
                for name, size, rows in _single_matrices(parameter, shape, found, source):
                    self._dequantize(name, size, (rows,))
            else:
                parts = tuple(rows for layer in found.values() for rows in whole(layer, source.infos(layer)))
                self._dequantize(self.base.stored_name(parameter), shape, parts)
            for layer in found.values():
                source.account_for(layer.tensors.values(), self._export_rule(layer))
            return
        for name, layer in found.items():
            self._export_layer(layer, source, self._out_name(parameter, name, source))

    def _export_layer(self, layer: LayerFormat, source: Source, name: str) -> None:
        kept = layer.format == "fp32" and is_published_in_fp32(name)  # in the BF16 releases too
        if kept or layer.format == self.options.to:
            self._copy(layer, source, name)
            return
        self._dequantize(name, layer.shape, whole(layer, source.infos(layer)))
        source.account_for(layer.tensors.values(), self._export_rule(layer))

    def _dequantize(self, name: str, shape: Shape, rows: tuple[Rows, ...]) -> None:
        self.made.units.append(Convert(rows, self.options.to, (Out(name, PLAIN_DTYPES[self.options.to], shape),)))

    def _export_rule(self, layer: LayerFormat) -> str:
        return (
            f"{'converted' if layer.format in PLAIN_DTYPES else 'dequantised'} from {layer.format} to {self.options.to}"
        )

    def _beside_the_model(self) -> None:
        """Layers of the base that Stoker does not use but other engines do."""
        for layer in self.base.layers.values():
            first = next(iter(layer.tensors.values()))
            if first in self.base.dispositions:
                continue
            cache_scale = is_cache_scale(layer.name)
            if cache_scale and self.options.to:
                self.base.account_for(layer.tensors.values(), "not used: KV-cache scales say nothing about an export")
            elif is_vision(first) and self.options.to:
                self._export_layer(layer, self.base, first)
            elif is_vision(first) or cache_scale:
                self._copy(layer, self.base, first)


def _single_matrices(
    parameter: str, shape: Shape, found: Mapping[str, LayerFormat], source: Source
) -> Iterator[tuple[str, Shape, Rows]]:
    """Name, shape and rows of each matrix of a parameter; fused 16-bit experts are split into single ones."""
    if EXPERTS not in parameter or len(found) > 1:
        for name, layer in found.items():
            yield name, layer.shape, whole(layer, source.infos(layer))[0]
        return
    ((stored, layer),) = found.items()
    start = 0
    for name, size in single_experts(stored, shape).items():
        yield name, size, Rows(layer, source.infos(layer), start, start + size[0])
        start += size[0]
    assert start == flat_rows(shape)


def _renamed(stored: str, layer: LayerFormat, name: str) -> str:
    """The name of `stored`, a tensor of `layer`, after the layer's plain tensor has been renamed to `name`."""
    return module_of(name) + stored.removeprefix(layer.name)
