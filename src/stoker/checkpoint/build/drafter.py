"""The DFlash drafter of a result: a checkpoint of its own in `drafter/`, checked against the trunk. No torch."""

from collections.abc import Sequence
from typing import Any

from stoker.checkpoint.build.options import BuildOptions
from stoker.checkpoint.build.plan import COPIED
from stoker.checkpoint.build.sources import Source
from stoker.checkpoint.build.units import PLAIN_DTYPES, Convert, Out, Unit, copies, outputs_of, unfit, whole
from stoker.errors import CheckpointError, ConfigError
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.formats.layout import Shape
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import drafter_parameters

FOLDER = "drafter"


def drafter_units(source: Source, raw: dict[str, Any], trunk: ModelConfig, options: BuildOptions) -> list[Unit]:
    """Units for all tensors of the drafter, checked against its config.json and the trunk: copied, quantised by
    --draft-weights or dequantised by --to."""
    units: list[Unit] = []
    for name, shape in drafter_parameters(_config(raw, trunk, source.where)).items():
        for stored, layer in source.find(name, shape).items():
            made, rule = _unit(source, stored, shape, layer, options)
            units += made
            source.account_for(layer.tensors.values(), rule)
    return units


def _unit(
    source: Source, name: str, shape: Shape, layer: LayerFormat, options: BuildOptions
) -> tuple[Sequence[Unit], str]:
    infos, target = source.infos(layer), options.scheme.drafts
    if options.to and layer.format != options.to:
        out = (Out(name, PLAIN_DTYPES[options.to], shape),)
        return [Convert(whole(layer, infos), options.to, out)], f"converted from {layer.format} to {options.to}"
    if not target or len(shape) < 2 or layer.format not in PLAIN_DTYPES:
        return copies(infos, layer.tensors), COPIED
    if reason := unfit(shape, target):
        return copies(infos, layer.tensors), f"kept in 16 bit: not {target}, {reason}"
    return [Convert(whole(layer, infos), target, outputs_of(name, shape, target))], f"quantised to {target}"


def _config(raw: dict[str, Any], trunk: ModelConfig, where: str) -> DFlashConfig:
    if not isinstance(raw.get("dflash_config"), dict):
        raise CheckpointError(f"{where}/config.json has no dflash_config: it is no DFlash drafter.")
    config = DFlashConfig.from_dict(raw, f"{where}/config.json")
    try:
        config.check_fits(trunk)
    except ConfigError as error:
        raise CheckpointError(f"{where}/config.json: {error}") from None
    if (found := raw.get("num_target_layers", trunk.num_layers)) != trunk.num_layers:
        raise CheckpointError(
            f"{where}/config.json: num_target_layers is {found}, the base has {trunk.num_layers}: "
            "the drafter belongs to another model."
        )
    return config
