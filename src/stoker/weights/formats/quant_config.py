"""What a checkpoint's `quantization_config` says about the layer named X: AutoRound, GPTQ, FP8,
compressed-tensors and ModelOpt rules, each in its publisher's own matching.

Says nothing about what is really in the files; `rules` compares the two. Plain Python, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import CheckpointError
from stoker.weights.formats.layout import UnreadFormat

PLAIN = "16 bit"  # any of bf16, fp16, fp32
# Hybrid checkpoints put FP8 where an INT4 release kept 16 bit, and published ones left the config as it was.
HYBRID = "fp8-b128"
CT_FORMATS = (
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision",
    "dense",
)  # fmt: skip


@dataclass(frozen=True)
class Expectation:
    """`format` is PLAIN, a name from `FORMATS`, or a description of something Stoker does not read."""

    format: str
    rule: str
    named: bool  # by a rule about this layer, not merely by the config's default
    hybrid: str = ""  # a format that may stand here all the same


Rules = Callable[[str], Expectation]
WRONG_KIND = (TypeError, ValueError, OverflowError, AttributeError)


def rules_of(config: Mapping[str, Any] | None) -> Rules:
    """The rules in a `quantization_config`, as a function from module name to expectation."""
    if not config:
        return lambda module: Expectation(PLAIN, "no quantization_config", named=False)
    method = str(config.get("quant_method") or ("modelopt" if "quantization" in config else ""))
    method = method.replace("_", "-")
    if method not in METHODS:
        raise UnreadFormat(
            f"quantization_config has quant_method {method or 'missing'}; Stoker reads {', '.join(METHODS)}."
        )
    return _guarded(method, config)


def _guarded(method: str, config: Mapping[str, Any]) -> Rules:
    """A value of the wrong type anywhere in the config ("bits": "four") is the user's mistake, not a traceback."""

    def refuse(error: Exception) -> CheckpointError:
        return CheckpointError(f"quantization_config ({method}) holds a value of the wrong kind: {error}.")

    try:
        rules = METHODS[method](config)
    except WRONG_KIND as error:
        raise refuse(error) from error

    def expect(module: str) -> Expectation:
        try:
            return rules(module)
        except WRONG_KIND as error:
            raise refuse(error) from error

    return expect


def _auto_round(config: Mapping[str, Any]) -> Rules:
    extra = _mapping(config, "extra_config")
    # A layer's own name holds dots, which as a pattern would match its neighbours' names too.
    patterns = [(_compiled(key, "extra_config"), key) for key in extra if set(key) & set("*+?^$()[]{}|\\")]
    named_blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
    named_blocks = named_blocks.split(",") if isinstance(named_blocks, str) else _flat(named_blocks)
    blocks = tuple(block.strip() for block in named_blocks)

    def expect(module: str) -> Expectation:
        key = module if module in extra else next((k for p, k in patterns if p.search(module)), None)
        if key is not None:
            rule = f"extra_config[{key!r}]"
            return Expectation(_int_format({**config, **_mapping(extra, key)}), rule, named=True, hybrid=HYBRID)
        if blocks and not _below_any(module, blocks):
            return Expectation(PLAIN, f"outside block_name_to_quantize {', '.join(blocks)}", named=False)
        if not blocks and module.rpartition(".")[2] == "lm_head":
            return Expectation(PLAIN, "lm_head is left alone unless extra_config names it", named=False)
        return Expectation(_int_format(config), _default_rule(config), named=False)

    return expect


def _gptq(config: Mapping[str, Any]) -> Rules:
    dynamic = _mapping(config, "dynamic")
    patterns = [(_compiled(key[2:] if key[:2] in ("+:", "-:") else key, "dynamic"), key) for key in dynamic]

    def expect(module: str) -> Expectation:
        key = next((key for pattern, key in patterns if pattern.match(module)), None)  # the first match decides
        # Qwen's releases list lm_head and embed_tokens with {}, which overrides nothing
        if key is not None and (key.startswith("-:") or dynamic[key]):
            settings = {"bits": 16} if key.startswith("-:") else {**config, **_mapping(dynamic, key)}
            return Expectation(_int_format(settings), f"dynamic[{key!r}]", named=True, hybrid=HYBRID)
        last = module.rpartition(".")[2]
        if last == "lm_head" and not config.get("lm_head"):
            return Expectation(PLAIN, "lm_head false", named=False)
        if last == "embed_tokens":
            return Expectation(PLAIN, "GPTQ quantises linear layers, not embeddings", named=False)
        return Expectation(_int_format(config), _default_rule(config), named=False)

    return expect


def _fp8(config: Mapping[str, Any]) -> Rules:
    kept = list(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
    names = frozenset(kept)
    block = config.get("weight_block_size")
    if not block:
        fmt = "fp8-tensor"
    else:
        fmt = "fp8-b128" if list(block) == [128, 128] else f"FP8 in {'x'.join(map(str, block))} blocks"

    def expect(module: str) -> Expectation:
        # An entry is a module, one of its parents ("model.visual") or the end of its name ("mlp.gate").
        parts = module.split(".")
        ancestors = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        endings = (".".join(parts[i:]) for i in range(1, len(parts)))
        if any((hit := name) in names for name in (*ancestors, *endings)):
            return Expectation(PLAIN, f"modules_to_not_convert has {hit!r}", named=True)
        return Expectation(fmt, f"quant_method fp8, weight_block_size {block}", named=False)

    return expect


def _compressed_tensors(config: Mapping[str, Any]) -> Rules:
    packing = config.get("format")
    if packing and packing not in CT_FORMATS:
        raise UnreadFormat(
            f"quantization_config has compressed-tensors' format {str(packing)[:40]}; "
            f"Stoker reads {', '.join(CT_FORMATS)}."
        )
    ignore = _ct_matcher(config.get("ignore") or ())
    groups = _config_groups(config, nvfp4="nvfp4-ct")

    def expect(module: str) -> Expectation:
        if entry := ignore(module):
            return Expectation(PLAIN, f"ignore has {entry!r}", named=True)
        return groups(module)

    return expect


def _modelopt(config: Mapping[str, Any]) -> Rules:
    # hf_quant_config.json nests what config.json carries flat, and calls its ignore list exclude_modules.
    flat = _mapping(config, "quantization") or config
    algo = str(flat.get("quant_algo") or "")
    layers = _mapping(flat, "quantized_layers")
    groups = _config_groups(flat, nvfp4="nvfp4-modelopt")
    excluded = [str(p) for p in flat.get("ignore") or flat.get("exclude_modules") or ()]
    # "*" crosses dots, and excluding a module excludes what is below it.
    globs = [(re.compile(re.escape(p).replace(r"\*", ".*") + r"(\..*)?"), p) for p in excluded]
    any_glob = re.compile("|".join(f"(?:{g.pattern})" for g, _ in globs) or r"(?!)")

    def expect(module: str) -> Expectation:
        if module in layers:
            layer_algo = str(_mapping(layers, module).get("quant_algo"))
            return Expectation(_modelopt_format(layer_algo), "quantized_layers", named=True)
        if any_glob.fullmatch(module):
            pattern = next(p for g, p in globs if g.fullmatch(module))
            return Expectation(PLAIN, f"ignore has {pattern!r}", named=True)
        if algo in ("MIXED_PRECISION", ""):
            return groups(module)
        return Expectation(_modelopt_format(algo), f"quant_algo {algo}", named=False)

    return expect


METHODS: dict[str, Callable[[Mapping[str, Any]], Rules]] = {
    "auto-round": _auto_round,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


def _int_format(settings: Mapping[str, Any]) -> str:
    """Of AutoRound and GPTQ settings. `stoker build` names its FP8 and INT8 layers in the same keys."""
    bits, group = int(settings.get("bits", 16)), settings.get("group_size", -1)
    data_type = str(settings.get("data_type", "int"))
    packing = str(settings.get("packing_format") or settings.get("checkpoint_format") or "gptq")
    if bits >= 16:
        return PLAIN
    if bits == 8 and data_type.startswith("fp"):
        return "fp8-b128" if isinstance(group, list | tuple) and list(group) == [128, 128] else "fp8-tensor"
    if bits == 8 and group == -1 and settings.get("sym", True):
        return "int8-row"
    fmt = f"{data_type}{bits}-g{group}"
    if not settings.get("sym", True):
        fmt += " asymmetric"
    if not packing.endswith("gptq"):
        fmt += f" packed as {packing}"
    return fmt


def _config_groups(config: Mapping[str, Any], nvfp4: str) -> Rules:
    """`config_groups` target layers by name or pattern, or all of them by the class name Linear."""
    groups = []
    config_groups = _mapping(config, "config_groups")
    for key in config_groups:
        group = _mapping(config_groups, key)
        targets = group.get("targets") or ()
        groups.append((key, _ct_matcher(targets), "Linear" in targets, _group_format(group, nvfp4)))

    def expect(module: str) -> Expectation:
        for key, target, _, fmt in groups:
            if entry := target(module):
                return Expectation(fmt, f"{key} targets {entry!r}", named=True)
        for key, _, every_linear, fmt in groups:
            if every_linear:
                return Expectation(fmt, f"{key} targets Linear", named=False)
        return Expectation(PLAIN, "no config group targets it", named=False)

    return expect


def _group_format(group: Mapping[str, Any], nvfp4: str) -> str:
    weights = _mapping(group, "weights")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy", "tensor")
    if not weights:
        return PLAIN
    if (bits, kind, weights.get("group_size")) == (4, "float", 16):
        return nvfp4
    if (bits, kind) == (8, "float") and strategy in ("tensor", "channel"):
        return "fp8-tensor" if strategy == "tensor" else "fp8-row"
    if (bits, kind, strategy, weights.get("block_structure")) == (8, "float", "block", [128, 128]):
        return "fp8-b128"
    if (bits, kind) == (4, "int") and weights.get("symmetric", True):
        return "int4-ct-row" if strategy == "channel" else f"int4-ct-g{weights.get('group_size')}"
    if (bits, kind, strategy) == (8, "int", "channel") and weights.get("symmetric", True):
        return "int8-row"
    return f"{kind} {bits} bit per {strategy}"


def _modelopt_format(algo: str) -> str:
    known = {"NVFP4": "nvfp4-modelopt", "W4A16_NVFP4": "nvfp4-modelopt", "FP8": "fp8-tensor"}
    return known.get(algo, f"ModelOpt {algo}")


def _ct_matcher(entries: Iterable[str]) -> Callable[[str], str | None]:
    """The entry that is this module's name, or whose "re:" pattern matches from its start."""
    names = frozenset(entries)
    patterns = [(_compiled(e[3:], "ignore or targets"), e) for e in names if e.startswith("re:")]

    def match(module: str) -> str | None:
        return module if module in names else next((e for p, e in patterns if p.match(module)), None)

    return match


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config {key} is {value!r:.60}, expected an object.")
    return value


def _compiled(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"quantization_config {key} has {pattern!r}, which is no valid pattern: {error}."
        ) from error


def _default_rule(config: Mapping[str, Any]) -> str:
    return f"bits {config.get('bits')}, group_size {config.get('group_size')}, sym {config.get('sym', True)}"


def _below_any(module: str, parents: Iterable[str]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def _flat(names: Iterable[Any]) -> list[str]:
    return [n for name in names for n in ([name] if isinstance(name, str) else _flat(name))]
