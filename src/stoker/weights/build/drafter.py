"""The DFlash drafter of a result: a checkpoint of its own in `drafter/`, checked against the trunk. No torch."""

from collections.abc import Sequence
from typing import Any

from stoker.errors import CheckpointError
from stoker.model.config import ModelConfig
from stoker.weights.build.plan import COPIED
from stoker.weights.build.recipe import Recipe
from stoker.weights.build.sources import Source
from stoker.weights.build.units import PLAIN_DTYPES, Convert, Out, Unit, copies, outputs_of, unfit, whole
from stoker.weights.formats.layout import Shape
from stoker.weights.formats.rules import LayerFormat

FOLDER = "drafter"


def drafter_units(source: Source, raw: dict[str, Any], trunk: ModelConfig, recipe: Recipe) -> list[Unit]:
    """All its tensors, once each is known to be what its config.json and the trunk ask for: copied, quantised by
    --draft-weights or dequantised by --to."""
    expected = _expected(raw, trunk, source.where)
    units: list[Unit] = []
    for name, shape in expected.items():
        for stored, layer in source.find(name, shape).items():
            made, rule = _unit(source, stored, shape, layer, recipe)
            units += made
            source.enter(layer.tensors.values(), rule)
    return units


def _unit(source: Source, name: str, shape: Shape, layer: LayerFormat, recipe: Recipe) -> tuple[Sequence[Unit], str]:
    infos, target = source.infos(layer), recipe.scheme.drafts
    if recipe.to and layer.format != recipe.to:
        out = (Out(name, PLAIN_DTYPES[recipe.to], shape),)
        return [Convert(whole(layer, infos), recipe.to, out)], f"converted from {layer.format} to {recipe.to}"
    if not target or len(shape) < 2 or layer.format not in PLAIN_DTYPES:
        return copies(infos, layer.tensors), COPIED
    if reason := unfit(shape, target):
        return copies(infos, layer.tensors), f"kept in 16 bit: not {target}, {reason}"
    return [Convert(whole(layer, infos), target, outputs_of(name, shape, target))], f"quantised to {target}"


def _expected(raw: dict[str, Any], trunk: ModelConfig, where: str) -> dict[str, Shape]:
    hidden, layers = _integer(raw, "hidden_size", where), _integer(raw, "num_hidden_layers", where)
    heads, keys = _integer(raw, "num_attention_heads", where), _integer(raw, "num_key_value_heads", where)
    size, wide = _integer(raw, "head_dim", where), _integer(raw, "intermediate_size", where)
    own = raw.get("dflash_config")
    taps = own.get("target_layer_ids") if isinstance(own, dict) else None
    if not isinstance(taps, list) or not taps or not all(type(tap) is int for tap in taps):
        raise CheckpointError(f"{where}/config.json has no dflash_config.target_layer_ids: it is no DFlash drafter.")
    for field, found, asked in (
        ("hidden_size", hidden, trunk.hidden_size),
        ("vocab_size", raw.get("vocab_size"), trunk.vocab_size),
        ("num_target_layers", raw.get("num_target_layers", trunk.num_layers), trunk.num_layers),
    ):
        if found != asked:
            raise CheckpointError(
                f"{where}/config.json: {field} is {found}, the base has {asked}: the drafter belongs to another model."
            )
    if max(taps) >= trunk.num_layers:
        raise CheckpointError(f"{where} reads layer {max(taps)} of the trunk, which has {trunk.num_layers} layers.")
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, Shape] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (keys * size, hidden),
        "self_attn.v_proj": (keys * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    return shapes | {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}


def _integer(raw: dict[str, Any], field: str, where: str) -> int:
    value = raw.get(field)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{where}/config.json: {field} is {value!r}, expected a whole number of at least 1.")
    return value
