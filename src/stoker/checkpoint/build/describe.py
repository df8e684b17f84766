"""config.json of the result, whose `quantization_config` agrees with the files about every layer.

Starts from the base's own and adds a rule wherever it would be wrong, in the words of its publisher; a mixture that
those words cannot describe is refused.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from stoker.checkpoint.build.options import BuildOptions
from stoker.checkpoint.build.units import PLAIN_DTYPES, int4_group
from stoker.errors import CheckpointError
from stoker.weights.formats.rules import Header, LayerFormat, formats_in, split_name
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import trunk_prefix

CONFIG_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
HOLDERS = ("quantization_config", "compression_config")

Settings = dict[str, Any]


def result_config(
    raw: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    header: Header,
    options: BuildOptions,
    model: ModelConfig,
) -> dict[str, Any]:
    """config.json of the base with the formats, the dtype and the MTP head of the result."""
    config = copy.deepcopy(dict(raw))
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    for holder in (config, text):
        for key in HOLDERS:
            holder.pop(key, None)
    if options.to:
        for holder in (config, text):
            for key in ("dtype", "torch_dtype"):
                if key in holder:
                    holder[key] = CONFIG_DTYPES[options.to]
        text.setdefault("dtype", CONFIG_DTYPES[options.to])
    if model.mtp_layers and not text.get("mtp_num_hidden_layers"):
        text["mtp_num_hidden_layers"] = model.mtp_layers
    described = describe(header, None if options.to else quantization, options.scheme.projections)
    if described:
        config["quantization_config"] = described
    return config


def drafter_config(raw: Mapping[str, Any], header: Header, options: BuildOptions) -> dict[str, Any]:
    """config.json of a drafter with the formats and the dtype of the result."""
    config = {key: copy.deepcopy(value) for key, value in raw.items() if key not in HOLDERS}
    if options.to:
        config |= {key: CONFIG_DTYPES[options.to] for key in ("dtype", "torch_dtype") if key in config}
    described = describe(header, None if options.to else raw.get(HOLDERS[0]), options.scheme.drafts)
    if described:
        config["quantization_config"] = described
    return config


def describe(header: Header, quantization: Mapping[str, Any] | None, projections: str) -> Settings | None:
    """A quantization_config with which the headers agree in every layer; None where all is in 16 bit.

    `projections` is the format most layers have where there is none to start from.
    """
    table = formats_in(header, None)
    if all(layer.format in PLAIN_DTYPES for layer in table.layers.values()):
        return None
    config = copy.deepcopy(dict(quantization)) if quantization else _fresh(projections, header)
    method = str(config.get("quant_method") or "modelopt").replace("_", "-")
    table = formats_in(header, config)
    for finding in table.findings:
        layer = table.layers.get(split_name(finding.tensor, header)[0])
        if layer is None:  # the headers contradict themselves
            raise CheckpointError(str(finding))
        WRITERS[method](config, layer)
    left = formats_in(header, config).findings
    if left:
        raise CheckpointError(_indescribable(method, left[0].tensor, left[0].found))
    return config


def _fresh(projections: str, header: Header) -> Settings:
    if projections == "fp8-b128":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [],
        }
    if not projections:  # 16 bit except for the layers that extra_config names
        return {"quant_method": "auto-round", "bits": 16, "data_type": "float", "sym": True, "extra_config": {}}
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "data_type": "int",
        "group_size": int4_group(projections),
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": f"{trunk_prefix(header)}layers",
        "extra_config": {},
    }


def _settings(layer: LayerFormat, method: str) -> Settings:
    """A format in the settings of AutoRound and GPTQ."""
    if layer.format in PLAIN_DTYPES:
        return {"bits": 16, "data_type": "float"}
    if layer.format == "fp8-b128":
        return {"bits": 8, "data_type": "fp8", "group_size": [128, 128]}
    if layer.format == "int8-row":
        return {"bits": 8, "data_type": "int", "group_size": -1}
    if layer.format.startswith("int4"):
        return {"bits": 4, "data_type": "int", "group_size": int4_group(layer.format), "sym": True}
    raise CheckpointError(_indescribable(method, layer.name, layer.format))


def _auto_round(config: Settings, layer: LayerFormat) -> None:
    config["extra_config"] = {**(config.get("extra_config") or {}), layer.name: _settings(layer, "auto-round")}


def _gptq(config: Settings, layer: LayerFormat) -> None:
    sign = "-:" if layer.format in PLAIN_DTYPES else "+:"
    rule = {f"{sign}^{re.escape(layer.name)}$": _settings(layer, "gptq")}
    config["dynamic"] = rule | (config.get("dynamic") or {})  # the first match decides


def _fp8(config: Settings, layer: LayerFormat) -> None:
    if layer.format not in PLAIN_DTYPES:
        raise CheckpointError(_indescribable("fp8", layer.name, layer.format))
    key = "ignored_layers" if config.get("ignored_layers") else "modules_to_not_convert"
    config[key] = [*(config.get(key) or ()), layer.name]


def _compressed_tensors(config: Settings, layer: LayerFormat) -> None:
    if layer.format in PLAIN_DTYPES:
        config["ignore"] = [*(config.get("ignore") or ()), layer.name]
        return
    if layer.format != "int8-row":
        raise CheckpointError(_indescribable("compressed-tensors", layer.name, layer.format))
    # A pattern such as "re:.*lm_head.*" hides the layer from every group, so it has to go with the name itself.
    config["ignore"] = [entry for entry in config.get("ignore") or () if not _ignores(entry, layer.name)]
    group = (config.get("config_groups") or {}).get("stoker_int8", {"targets": []})
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": [*group["targets"], f"re:^{re.escape(layer.name)}$"], "weights": weights}
    config["config_groups"] = {**(config.get("config_groups") or {}), "stoker_int8": group}


def _ignores(entry: str, module: str) -> bool:
    return entry == module or (entry.startswith("re:") and re.match(entry[3:], module) is not None)


def _modelopt(config: Settings, layer: LayerFormat) -> None:
    if layer.format not in PLAIN_DTYPES:
        raise CheckpointError(_indescribable("modelopt", layer.name, layer.format))
    flat = config["quantization"] if isinstance(config.get("quantization"), dict) else config
    key = "exclude_modules" if "exclude_modules" in flat else "ignore"
    flat[key] = [*(flat.get(key) or ()), layer.name]


WRITERS: dict[str, Callable[[Settings, LayerFormat], None]] = {
    "auto-round": _auto_round,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


def _indescribable(method: str, name: str, found: str) -> str:
    return (
        f"{name} would be {found}, and a quantization_config of kind {method} has no words for that beside its own "
        "format; start from an INT4 release (AutoRound or GPTQ) or from the BF16 release."
    )
