"""What is this checkpoint? Its parts, their formats and bytes, what a step reads, and everything that is wrong with it.

Reads headers and, of an MTP head, small samples; with `verify`, every byte. Collects problems where loading would stop
at the first. No torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from stoker.checkpoint.inspect.mtp import MtpReport, inspect_mtp
from stoker.checkpoint.inspect.verify import Progress, VerifyReport, verify
from stoker.errors import StokerError, brief, visible
from stoker.sizes.network import Network
from stoker.sizes.step import TokenReads
from stoker.sizes.weights import WeightBytes
from stoker.weights.checkpoint import Checkpoint
from stoker.weights.dflash_config import DFlashConfig
from stoker.weights.formats.layout import PLAIN_FORMATS
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.headers import Reads
from stoker.weights.json_file import read_json
from stoker.weights.model_config import ModelConfig
from stoker.weights.names import GROUPS, OTHER, group_of, is_mtp, is_published_in_fp32
from stoker.weights.problems import Problem
from stoker.weights.resolve import Resolution, resolve_model

CONFIG_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
UNREADABLE = "unreadable"
SMALL = 0.01  # formats with a smaller share of a group's bytes are listed in `formats` only
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Group:
    name: str
    format: str  # "int4-g128", or "fp8-b128 + bf16" where several matter
    bytes: int
    tensors: int
    parameters: int
    formats: Mapping[str, int]  # format -> bytes


@dataclass(frozen=True)
class Inspection:
    directory: Path
    architecture: str
    config: ModelConfig | None  # None: config.json is missing, broken or not supported
    groups: tuple[Group, ...]
    weights: WeightBytes
    step: TokenReads | None
    mtp: MtpReport
    problems: tuple[Problem, ...]  # errors first
    files: int
    bytes_on_disk: int
    bytes_read: int  # by this inspection, without --verify
    verified: VerifyReport | None

    @property
    def parameters(self) -> int:
        return sum(group.parameters for group in self.groups)

    @property
    def active_parameters(self) -> int | None:
        """Parameters of the trunk that one token uses: all but the experts that are not chosen."""
        return Network.of(self.config).active_parameters if self.config else None

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def verdict(self) -> str:
        if self.errors:
            return f"Not usable as it is: {len(self.errors)} error{'s' if len(self.errors) > 1 else ''}."
        if not self.mtp.present:
            return "Usable, without MTP drafting." if self.mtp.expected else "Usable."
        return "Usable, MTP drafting included."

    def to_json(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "groups": [asdict(group) for group in self.groups],
            "bytes_per_step": self.step.total if self.step else None,
            "step_reads": [{"name": k, "bytes": v} for k, v in self.step.items.items()] if self.step else [],
            "kv_bytes_per_token": self.step.kv_bytes_per_token if self.step else None,
            "bytes_per_mtp_draft": self.step.draft_bytes if self.step else None,
            "mtp": {key: value for key, value in asdict(self.mtp).items() if key != "problems"},
            "problems": [asdict(problem) for problem in self.problems],
            "usable": not self.errors,
            "verdict": self.verdict,
            "files": self.files,
            "tensors": sum(group.tensors for group in self.groups),
            "bytes": self.bytes_on_disk,
            "bytes_read": self.bytes_read,
            "verified": None if self.verified is None else {
                "bytes": self.verified.bytes,
                "files": self.verified.files,
                "checksums_matching": self.verified.matching,
                "without_checksum": list(self.verified.without_checksum),
            },
        }  # fmt: skip


def inspect(directory: Path, *, verify_bytes: bool = False, progress: Progress | None = None) -> Inspection:
    """Everything that headers and small samples tell about `directory`; raises only if it is not a directory."""
    reads = Reads()
    checkpoint = Checkpoint.scan(directory, reads)
    config, architecture, problems = _config(directory)
    problems += [*checkpoint.problems, *checkpoint.format_problems, *_text_problems(directory, config)]
    if config and checkpoint.tensors:
        resolution = resolve_model(config, checkpoint)
        problems += [*resolution.problems(), *_precision(config, resolution)]
        mtp = inspect_mtp(resolution, 0.0 if config.norm_offset else 1.0, reads)
        problems += mtp.problems
    else:
        present = any(map(is_mtp, checkpoint.tensors))
        mtp = MtpReport(present, complete=False, sane=None, found=0, expected=0, sampled_bytes=0)
    verified = verify(checkpoint, progress) if verify_bytes else None
    layers = checkpoint.formats.layers
    weights = WeightBytes.stored((name, layer.format, layer.nbytes) for name, layer in layers.items())
    problems += verified.problems if verified else ()
    return Inspection(
        directory=directory,
        architecture=architecture,
        config=config,
        groups=_groups(checkpoint),
        weights=weights,
        step=TokenReads.of(Network.of(config), weights) if config and checkpoint.tensors else None,
        mtp=mtp,
        problems=tuple(sorted(problems, key=lambda problem: problem.severity != "error")),
        files=len(checkpoint.sizes),
        bytes_on_disk=sum(checkpoint.sizes.values()),
        bytes_read=reads.count,
        verified=verified,
    )


def _config(directory: Path) -> tuple[ModelConfig | None, str, list[Problem]]:
    try:
        raw = read_json(directory / "config.json")
    except StokerError as error:
        return None, "unknown", [Problem("error", str(error), "config.json", fix="Fetch config.json.")]
    kind = raw.get("model_type", "unknown")
    architecture = visible(kind, keep="")[:80] if isinstance(kind, str) else brief(kind)
    if "dflash_config" in raw:
        return None, "dflash", [_drafter_problem(raw)]
    try:
        config = ModelConfig.load(directory)
    except StokerError as error:
        fix = "Use a model of a supported family, or vLLM through stoker up."
        return None, architecture, [Problem("error", str(error), "config.json", fix=fix)]
    return config, config.family, []


def _drafter_problem(raw: dict[str, Any]) -> Problem:
    try:
        DFlashConfig.from_dict(raw)
    except StokerError as error:
        fix = "Use a DFlash drafter that Stoker computes, or draft with --draft mtp."
        return Problem("error", f"This is a DFlash drafter that Stoker cannot use: {error}", "config.json", fix=fix)
    message = "This is a DFlash drafter, not a model of its own."
    return Problem("error", message, "config.json", fix="Add it to a model: stoker build --base MODEL --drafter DIR.")


def _precision(config: ModelConfig, resolution: Resolution) -> list[Problem]:
    """16- and 32-bit tensors that are not of config.json's dtype are converted, which may cost bits."""
    said = CONFIG_FORMATS.get(config.dtype, "")
    other: dict[str, list[LayerFormat]] = {}
    for layer in (place.layer for place in resolution.places):
        if layer is None or layer.format == said or is_published_in_fp32(layer.name):
            continue
        if layer.format in PLAIN_FORMATS.values():
            other.setdefault(layer.format, []).append(layer)
    problems = []
    for stored, layers in other.items():
        info = resolution.checkpoint.tensors[next(iter(layers[0].tensors.values()))]
        message = (
            f"{len(layers):,} tensors are {stored} where config.json says dtype {config.dtype}, first {info.name}."
        )
        fix = "They are converted when loaded; nothing to do unless that is a surprise."
        problems.append(Problem("note", message, info.file.name, info.name, fix))
    return problems


def _text_problems(directory: Path, config: ModelConfig | None) -> list[Problem]:
    """Problems with tokenizer, chat template and stop tokens: small files that are easily forgotten in a copy."""
    if not any((directory / name).exists() for name in TOKENIZER):
        message = f"There is no tokenizer: expected {' or '.join(TOKENIZER)}."
        fix = "Copy the tokenizer files of the original model into the directory."
        return [Problem("error", message, TOKENIZER[0], fix=fix)]
    problems = []
    if not any((directory / name).exists() for name in CHAT_TEMPLATES) and not _template_in_settings(directory):
        message = "There is no chat template, so only plain text can be continued."
        problems.append(Problem("note", message, CHAT_TEMPLATES[0], fix=f"Copy {CHAT_TEMPLATES[0]} of the original."))
    if config and len(config.eos_token_ids) < 2 and not (directory / "generation_config.json").exists():
        message = f"config.json names {len(config.eos_token_ids)} stop token(s) and there is no generation_config.json:"
        message += " answers may run past the end of a turn."
        fix = "Copy generation_config.json of the original model."
        problems.append(Problem("note", message, "generation_config.json", fix=fix))
    return problems


def _template_in_settings(directory: Path) -> bool:
    try:
        return bool(read_json(directory / "tokenizer_config.json").get("chat_template"))
    except StokerError:
        return False


def _groups(checkpoint: Checkpoint) -> tuple[Group, ...]:
    sizes: dict[str, int] = {}
    tensors: dict[str, int] = {}
    parameters: dict[str, int] = {}
    formats: dict[str, dict[str, int]] = {}
    for name, info in checkpoint.tensors.items():
        group = group_of(name)
        sizes[group] = sizes.get(group, 0) + info.nbytes
        tensors[group] = tensors.get(group, 0) + 1
    for module, layer in checkpoint.formats.layers.items():
        group = group_of(module)
        known = formats.setdefault(group, {})
        known[layer.format] = known.get(layer.format, 0) + layer.nbytes
        parameters[group] = parameters.get(group, 0) + (prod(layer.shape) if group != OTHER else 0)
    found = []
    for group in (group for group in GROUPS if group in sizes):
        known = formats.get(group, {})
        if rest := sizes[group] - sum(known.values()):
            known[UNREADABLE] = rest
        ranked = dict(sorted(known.items(), key=lambda item: -item[1]))
        named = [name for name, size in ranked.items() if size >= SMALL * sizes[group] or name == UNREADABLE]
        text = " + ".join(named)
        found.append(Group(group, text, sizes[group], tensors[group], parameters.get(group, 0), ranked))
    return tuple(found)
