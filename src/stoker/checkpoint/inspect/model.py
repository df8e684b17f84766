"""The tensors of a checkpoint against what its config.json asks for: missing, misshapen, unknown, oddly stored.

Like faults become one problem with a count and the first name: a wrong config.json would else give thousands.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stoker.weights.expected import Shape, expected_parameters, single_experts
from stoker.weights.files import Files
from stoker.weights.formats.layout import INSTEAD, PLAIN_FORMATS, SUFFIXES
from stoker.weights.formats.rules import Finding, FormatTable, LayerFormat
from stoker.weights.groups import HEAD, MTP, OTHER, VISION, group_of
from stoker.weights.model_config import ModelConfig
from stoker.weights.problems import Problem
from stoker.weights.resolve import EXPERTS, HEAD_NAMES, MTP_PREFIX, TRUNK_PREFIXES

CONFIG_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SINGLE_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\d+(?=\.)")
KEPT_FP32 = (".A_log", ".linear_attn.norm")  # published in either precision, computed in fp32
WRONG_CONFIG = "Check that config.json belongs to these weights; if it does, fetch them again."


@dataclass(frozen=True)
class Demand:
    """What config.json asks for, under the names of this checkpoint: module -> logical shape."""

    modules: Mapping[str, Shape]
    missing: tuple[str, ...]

    def of_mtp(self, modules: Iterable[str]) -> list[str]:
        return [module for module in modules if module.startswith(MTP_PREFIX)]


def demand(config: ModelConfig, files: Files, table: FormatTable) -> Demand:
    prefix = _trunk_prefix(files)
    single = any(SINGLE_EXPERT.search(name) for name in table.layers)
    modules: dict[str, Shape] = {}
    for name, shape in expected_parameters(config).items():
        if name == "lm_head.weight":
            full = next((head for head in HEAD_NAMES if _stored(head.removesuffix(".weight"), files)), name)
        else:
            full = name if name.startswith(MTP_PREFIX) else prefix + name
        if EXPERTS in full and not _stored(full, files):
            parts = single_experts(full, shape)
            # neither form is there: miss it in the form the rest of the checkpoint has, in MTP the published one
            if single or full.startswith(MTP_PREFIX) or any(_stored(p.removesuffix(".weight"), files) for p in parts):
                modules |= {part.removesuffix(".weight"): each for part, each in parts.items()}
                continue
        modules[full.removesuffix(".weight")] = shape
    missing = tuple(module for module in modules if module not in table.layers and not _stored(module, files))
    return Demand(modules, missing)


def structure_problems(config: ModelConfig, wanted: Demand, files: Files, table: FormatTable) -> list[Problem]:
    return [
        *_missing(wanted, files),
        *_misshapen(wanted, files, table),
        *_unknown(config, wanted, files, table),
        *_unloadable(wanted, files, table),
        *_precision(config, wanted, files, table),
    ]


def format_problems(table: FormatTable, files: Files) -> list[Problem]:
    """Contradictions that `formats_in` found between headers, or between headers and quantization_config."""
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in table.findings:
        kind = "" if finding.severity == "note" else group_of(finding.tensor)
        stored = re.sub(r"\d+", "#", finding.found) if not finding.rule else finding.found
        alike.setdefault((finding.severity, kind, finding.expected, stored), []).append(finding)
    return [_format_problem(found, files) for found in alike.values()]


def _format_problem(found: list[Finding], files: Files) -> Problem:
    first = found[0]
    info = files.tensors.get(first.tensor)
    file, tensor = (info.file.name, info.name) if info else (first.tensor, None)
    if first.severity == "error":
        more = f" ({len(found):,} layers alike.)" if len(found) > 1 else ""
        fix = f"Fetch {file} and config.json again; if it stays so, they are of different releases."
        fix = INSTEAD if first.unread else fix
        return Problem("error", f"{first}{more}", file, tensor, fix)
    # Routers and convolutions are never quantised, and no release lists them: one sentence for all.
    groups = ", ".join(dict.fromkeys(group_of(finding.tensor) for finding in found))
    message = (
        f"{len(found):,} layer{'s are' if len(found) > 1 else ' is'} stored as {first.found} where quantization_config "
        f"says {first.expected} ({first.rule}): {groups}, first {first.tensor}."
    )
    return Problem("note", message, file, tensor, "Nothing to do: the headers decide.")


def _trunk_prefix(files: Files) -> str:
    for prefix in TRUNK_PREFIXES:
        if _stored(f"{prefix}embed_tokens", files):
            return prefix
    for prefix in TRUNK_PREFIXES:  # no embedding: go by the layers
        if any(name.startswith(f"{prefix}layers.") for name in files.tensors):
            return prefix
    return TRUNK_PREFIXES[0]


def _stored(module: str, files: Files) -> bool:
    """Whether anything of a module is in the headers, readable or not; the unreadable is reported as such."""
    return module in files.tensors or any(f"{module}.{suffix}" in files.tensors for suffix in SUFFIXES)


def _missing(wanted: Demand, files: Files) -> list[Problem]:
    total, missing = _by_group(wanted.modules), _by_group(wanted.missing)
    problems = []
    for group, names in missing.items():
        counted = f"{len(names):,} of {len(total[group]):,} {group} tensors"
        first = f"{names[0]} {list(wanted.modules[names[0]])}"
        if group != MTP:
            message = f"{counted} missing, first {first}."
            problems.append(Problem("error", message, None, names[0], "Fetch the file that holds them."))
            continue
        graft = f"stoker build --base {files.directory} --mtp DIR_WITH_MTP --out NEW adds them"
        if len(names) == len(total[MTP]):
            message = f"config.json announces an MTP head, but all {len(names):,} MTP tensors are missing."
            fix = f"It runs without MTP drafting; {graft}."
            problems.append(Problem("note", message, None, names[0], fix))
        else:
            message = f"{counted} missing, first {first}."
            problems.append(Problem("error", message, None, names[0], f"Fetch the file that holds them, or {graft}."))
    return problems


def _misshapen(wanted: Demand, files: Files, table: FormatTable) -> list[Problem]:
    wrong = [
        module
        for module, shape in wanted.modules.items()
        if module in table.layers and table.layers[module].shape != shape
    ]
    problems = []
    for group, modules in _by_group(wrong).items():
        layer = table.layers[modules[0]]
        tensor = next(iter(layer.tensors.values()))
        more = f" ({len(modules):,} {group} layers have a wrong shape.)" if len(modules) > 1 else ""
        stored = f" (stored as {layer.format})" if len(layer.tensors) > 1 else ""
        message = f"{tensor} has shape {list(layer.shape)}{stored}, config.json asks for "
        message += f"{list(wanted.modules[modules[0]])}.{more}"
        problems.append(Problem("error", message, files.tensors[tensor].file.name, tensor, WRONG_CONFIG))
    return problems


def _unknown(config: ModelConfig, wanted: Demand, files: Files, table: FormatTable) -> list[Problem]:
    extra = _by_group(module for module in table.layers if module not in wanted.modules)
    rules = {
        VISION: "Stoker computes text only",
        MTP: "config.json has no MTP head (mtp_num_hidden_layers)" if not config.mtp_layers else "",
        HEAD: "config.json ties the head to the embedding" if config.tie_word_embeddings else "",
    }
    problems = []
    for group, modules in extra.items():
        explained = [m for m in modules if m.endswith(("rotary_emb.inv_freq", ".k_scale", ".v_scale"))]
        if explained:
            message = f"{len(explained):,} tensors not used, first {explained[0]}: rotary tables and KV-cache scales."
            problems.append(Problem("note", message, tensor=explained[0], fix="Nothing to do."))
            modules = [module for module in modules if module not in set(explained)]
        if not modules:
            continue
        tensor = next(iter(table.layers[modules[0]].tensors.values()))
        file = files.tensors[tensor].file.name
        if rule := rules.get(group):
            message = f"{len(modules):,} {group} tensors not used: {rule}."
            problems.append(Problem("note", message, file, tensor, "Nothing to do."))
        else:
            kind = "unknown" if group == OTHER else group
            message = f"{len(modules):,} {kind} tensors have no place in this model, first {tensor}."
            problems.append(Problem("error", message, file, tensor, WRONG_CONFIG))
    return problems


def _unloadable(wanted: Demand, files: Files, table: FormatTable) -> list[Problem]:
    """Readable, of the right shape, and still refused by the loader: quantised where only matrices of a linear layer
    may be, or experts of one layer in several formats."""
    quantised, mixed = [], []
    bands: dict[str, str] = {}  # "...experts.#.up_proj" -> format of the first expert
    for module in wanted.modules:
        layer = table.layers.get(module)
        if layer is None:
            continue
        if layer.format not in PLAIN_FORMATS.values() and module.endswith(("embed_tokens", "conv1d")):
            quantised.append(layer)
        if (match := SINGLE_EXPERT.search(module)) and layer.format != bands.setdefault(
            f"{module[: match.start()]}#{module[match.end() :]}", layer.format
        ):
            mixed.append(layer)
    problems = []
    for layers, reason in (
        (quantised, "which Stoker reads in 16 or 32 bit only"),
        (mixed, "unlike the first expert of its layer; the experts of a layer must share one format"),
    ):
        if layers:
            tensor = next(iter(layers[0].tensors.values()))
            more = f" ({len(layers):,} layers alike.)" if len(layers) > 1 else ""
            message = f"{tensor} is stored as {layers[0].format}, {reason}.{more}"
            fix = "Use a release, or a stoker build, that stores it so."
            problems.append(Problem("error", message, files.tensors[tensor].file.name, tensor, fix))
    return problems


def _precision(config: ModelConfig, wanted: Demand, files: Files, table: FormatTable) -> list[Problem]:
    """16- and 32-bit tensors that are not of config.json's dtype are converted, which may cost bits."""
    said = CONFIG_FORMATS.get(config.dtype, "")
    other: dict[str, list[LayerFormat]] = {}
    for module in wanted.modules:
        layer = table.layers.get(module)
        if not layer or layer.format == said or module.endswith(KEPT_FP32):
            continue
        if layer.format in PLAIN_FORMATS.values():
            other.setdefault(layer.format, []).append(layer)
    problems = []
    for stored, layers in other.items():
        tensor = next(iter(layers[0].tensors.values()))
        message = f"{len(layers):,} tensors are {stored} where config.json says dtype {config.dtype}, first {tensor}."
        fix = "They are converted when loaded; nothing to do unless that is a surprise."
        problems.append(Problem("note", message, files.tensors[tensor].file.name, tensor, fix))
    return problems


def _by_group(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    return groups
