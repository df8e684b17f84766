"""What a checkpoint's `quantization_config` says about the layer named X: AutoRound, GPTQ, FP8,
compressed-tensors and ModelOpt rules, each in its publisher's own matching.

Says nothing about what is really in the files; `rules` compares the two. Plain Python, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.errors import CheckpointError, brief
from stoker.weights.formats.layout import UnreadFormat
from stoker.weights.formats.patterns import Pattern, Patterns

PLAIN = "16 bit"  # any of bf16, fp16, fp32
# Hybrid checkpoints put FP8 where an INT4 release kept 16 bit, and published ones left the config as it was.
HYBRID = "fp8-b128"
CT_FORMATS = (
    "pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision",
    "dense",
)  # fmt: skip
MOST_GROUPS = 100  # config_groups, which are gone through for every layer; published files have up to five


@dataclass(frozen=True)
class Expectation:
    """`format` is PLAIN, a name from `FORMATS`, or a description of something Stoker does not read."""

    format: str
    rule: str
    named: bool  # by a rule about this layer, not merely by the config's default
    hybrid: str = ""  # another format that is accepted here


Rules = Callable[[str], Expectation]
WRONG_KIND = (TypeError, ValueError, OverflowError, AttributeError)


def rules_of(config: Mapping[str, Any] | None, modules: Sequence[str]) -> Rules:
    """The rules in a `quantization_config`, as a function from the name of one of `modules` to expectation."""
    if not config:
        return lambda module: Expectation(PLAIN, "no quantization_config", named=False)
    method = str(config.get("quant_method") or ("modelopt" if "quantization" in config else ""))
    method = method.replace("_", "-")
    if method not in METHODS:
        raise UnreadFormat(
            f"quantization_config has quant_method {method[:80] or 'missing'}; Stoker reads {', '.join(METHODS)}."
        )
    return _guarded(method, config, Patterns(modules))


def _guarded(method: str, config: Mapping[str, Any], patterns: Patterns) -> Rules:
    """Turns errors about values of the wrong type ("bits": "four") into a CheckpointError."""

    def refuse(error: Exception) -> CheckpointError:
        return CheckpointError(f"quantization_config ({method}) holds a value of the wrong kind: {str(error)[:200]}.")

    try:
        rules = METHODS[method](config, patterns)
    except WRONG_KIND as error:
        raise refuse(error) from error

    def expect(module: str) -> Expectation:
        try:
            return rules(module)
        except WRONG_KIND as error:
            raise refuse(error) from error

    return expect


def _auto_round(config: Mapping[str, Any], patterns: Patterns) -> Rules:
    extra = _mapping(config, "extra_config")
    # A plain name has dots, which as a regular expression would match its neighbours' names too.
    described = [Pattern(key, key) for key in extra if set(key) & set("*+?^$()[]{}|\\")]
    fitting = patterns.first("extra_config", "search", described)
    named_blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
    named_blocks = named_blocks.split(",") if isinstance(named_blocks, str) else _flat(named_blocks)
    blocks = tuple(block.strip() for block in named_blocks)
    block_names = frozenset(blocks)

    def expect(module: str) -> Expectation:
        key = module if module in extra else fitting(module)
        if key is not None:
            rule = f"extra_config[{brief(key)}]"
            return Expectation(_int_format({**config, **_mapping(extra, key)}), rule, named=True, hybrid=HYBRID)
        if blocks and not block_names.intersection(_ancestors(module)):
            return Expectation(PLAIN, f"outside block_name_to_quantize {', '.join(blocks[:4])}", named=False)
        if not blocks and module.rpartition(".")[2] == "lm_head":
            return Expectation(PLAIN, "lm_head is left alone unless extra_config names it", named=False)
        return Expectation(_int_format(config), _default_rule(config), named=False)

    return expect


def _gptq(config: Mapping[str, Any], patterns: Patterns) -> Rules:
    dynamic = _mapping(config, "dynamic")
    keys = [Pattern(key[2:] if key[:2] in ("+:", "-:") else key, key) for key in dynamic]
    fitting = patterns.first("dynamic", "match", keys)

    def expect(module: str) -> Expectation:
        key = fitting(module)  # the first match decides
        # Qwen's releases list lm_head and embed_tokens with {}, which overrides nothing
        if key is not None and (key.startswith("-:") or dynamic[key]):
            settings = {"bits": 16} if key.startswith("-:") else {**config, **_mapping(dynamic, key)}
            return Expectation(_int_format(settings), f"dynamic[{brief(key)}]", named=True, hybrid=HYBRID)
        last = module.rpartition(".")[2]
        if last == "lm_head" and not config.get("lm_head"):
            return Expectation(PLAIN, "lm_head false", named=False)
        if last == "embed_tokens":
            return Expectation(PLAIN, "GPTQ quantises linear layers, not embeddings", named=False)
        return Expectation(_int_format(config), _default_rule(config), named=False)

    return expect


def _fp8(config: Mapping[str, Any], patterns: Patterns) -> Rules:
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
        endings = (".".join(parts[i:]) for i in range(1, len(parts)))
        if any((hit := name) in names for name in (*_ancestors(module), *endings)):
            return Expectation(PLAIN, f"modules_to_not_convert has {hit!r}", named=True)
        return Expectation(fmt, f"quant_method fp8, weight_block_size {block}", named=False)

    return expect


def _compressed_tensors(config: Mapping[str, Any], patterns: Patterns) -> Rules:
    packing = config.get("format")
    if packing and packing not in CT_FORMATS:
        raise UnreadFormat(
            f"quantization_config has compressed-tensors' format {str(packing)[:40]}; "
            f"Stoker reads {', '.join(CT_FORMATS)}."
        )
    ignore = _ct_matcher(config.get("ignore") or (), "ignore", patterns)
    groups = _config_groups(config, "nvfp4-ct", patterns)

    def expect(module: str) -> Expectation:
        if entry := ignore(module):
            return Expectation(PLAIN, f"ignore has {brief(entry)}", named=True)
        return groups(module)

    return expect


def _modelopt(config: Mapping[str, Any], patterns: Patterns) -> Rules:
    # hf_quant_config.json nests what config.json carries flat, and calls its ignore list exclude_modules.
    flat = _mapping(config, "quantization") or config
    algo = str(flat.get("quant_algo") or "")
    layers = _mapping(flat, "quantized_layers")
    groups = _config_groups(flat, "nvfp4-modelopt", patterns)
    excluded = [str(entry) for entry in flat.get("ignore") or flat.get("exclude_modules") or ()]
    names = frozenset(entry for entry in excluded if "*" not in entry)
    # "*" crosses dots, and excluding a module excludes what is below it.
    globs = [Pattern(re.escape(e).replace(r"\*", ".*") + r"(\..*)?", e) for e in excluded if "*" in e]
    fitting = patterns.first("ignore", "fullmatch", globs)

    def expect(module: str) -> Expectation:
        if module in layers:
            layer_algo = str(_mapping(layers, module).get("quant_algo"))
            return Expectation(_modelopt_format(layer_algo), "quantized_layers", named=True)
        entry = next((name for name in _ancestors(module) if name in names), None) or fitting(module)
        if entry is not None:
            return Expectation(PLAIN, f"ignore has {brief(entry)}", named=True)
        if algo in ("MIXED_PRECISION", ""):
            return groups(module)
        return Expectation(_modelopt_format(algo), f"quant_algo {algo}", named=False)

    return expect


METHODS: dict[str, Callable[[Mapping[str, Any], Patterns], Rules]] = {
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


def _config_groups(config: Mapping[str, Any], nvfp4: str, patterns: Patterns) -> Rules:
    """`config_groups` target layers by name or pattern, or all of them by the class name Linear."""
    groups = []
    config_groups = _mapping(config, "config_groups")
    if len(config_groups) > MOST_GROUPS:
        raise CheckpointError(
            f"quantization_config has {len(config_groups):,} config_groups, expected at most {MOST_GROUPS}."
        )
    for key in config_groups:
        group = _mapping(config_groups, key)
        targets = group.get("targets") or ()
        groups.append(
            (key, _ct_matcher(targets, "targets", patterns), "Linear" in targets, _group_format(group, nvfp4))
        )

    def expect(module: str) -> Expectation:
        for key, target, _, fmt in groups:
            if entry := target(module):
                return Expectation(fmt, f"{key} targets {brief(entry)}", named=True)
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


def _ct_matcher(entries: Iterable[str], field: str, patterns: Patterns) -> Callable[[str], str | None]:
    """The entry that is this module's name, or whose "re:" pattern matches from its start."""
    names = dict.fromkeys(entries)
    fitting = patterns.first(field, "match", [Pattern(e[3:], e) for e in names if e.startswith("re:")])

    def match(module: str) -> str | None:
        return module if module in names else fitting(module)

    return match


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"quantization_config {key} is {brief(value)}, expected an object.")
    return value


def _default_rule(config: Mapping[str, Any]) -> str:
    return f"bits {config.get('bits')}, group_size {config.get('group_size')}, sym {config.get('sym', True)}"


def _ancestors(module: str) -> list[str]:
    """The module itself and its parents, innermost first."""
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


def _flat(names: Iterable[Any]) -> list[str]:
    return [n for name in names for n in ([name] if isinstance(name, str) else _flat(name))]
