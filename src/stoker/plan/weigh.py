"""Bytes of a model's weights: by group, on disk and in memory, and what a step reads of them.

Either from a scheme ("int4+fp8") applied to the shapes, or from a checkpoint's own headers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import RequestError
from stoker.plan.catalog import Scheme
from stoker.plan.formats import fits, weight_bytes
from stoker.plan.shapes import GROUP_KEYS, Model, Weight
from stoker.weights.groups import EMBEDDING, GROUPS, HEAD, MTP, OTHER, ROUTED, VISION

BF16 = "bf16"


@dataclass(frozen=True)
class Weighed:
    """Bytes by group; of the MTP head, its experts apart, of which a draft reads a few."""

    groups: Mapping[str, int]
    mtp_experts: int
    formats: Mapping[str, str]  # group -> the format most of its bytes are in
    title: str
    exact: bool  # False: averages of a mixed file
    tied_head: bool = False

    @property
    def total(self) -> int:
        return sum(self.groups.values())

    @property
    def trunk(self) -> int:
        return sum(size for group, size in self.groups.items() if group not in (MTP, VISION))

    @property
    def head(self) -> int:
        return self.groups.get(EMBEDDING if self.tied_head else HEAD, 0)

    def fixed_reads(self) -> dict[str, int]:
        """What every verify step reads whole, however many tokens it verifies."""
        skip = (ROUTED, EMBEDDING, MTP, VISION, OTHER, HEAD)
        return {**{g: size for g, size in self.groups.items() if g not in skip}, HEAD: self.head}


def weigh(model: Model, scheme: Scheme) -> Weighed:
    sizes: dict[str, int] = {}
    kinds: dict[str, dict[str, int]] = {}
    mtp_experts = 0
    for weight in model.weights:
        name = format_of(weight, scheme)
        size = weight.count * weight_bytes(name, weight.shape)
        sizes[weight.group] = sizes.get(weight.group, 0) + size
        by_format = kinds.setdefault(weight.group, {})
        by_format[name] = by_format.get(name, 0) + size
        if weight.group == MTP and weight.part == ROUTED:
            mtp_experts += size
    if model.vision_parameters and not scheme.approximate:  # GGUF files keep vision apart
        sizes[VISION] = 2 * model.vision_parameters
        kinds[VISION] = {BF16: sizes[VISION]}
    return Weighed(
        groups={group: sizes[group] for group in GROUPS if group in sizes},
        mtp_experts=mtp_experts,
        formats={group: max(found, key=found.__getitem__) for group, found in kinds.items()},
        title=scheme.title,
        exact=not scheme.approximate,
        tied_head=HEAD not in sizes,
    )


def format_of(weight: Weight, scheme: Scheme) -> str:
    key = next((key for key, group in GROUP_KEYS.items() if group == weight.part), "")
    wanted = scheme.parts.get(key, scheme.parts.get("deltanet", BF16) if key == "feeding" else BF16)
    if weight.group == MTP and (scheme.mtp != "trunk" or weight.name == "mtp.fc.weight"):
        wanted = BF16
    if scheme.not_gates and weight.name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        wanted = BF16
    if weight.name.endswith((".A_log", "linear_attn.norm.weight")):  # Qwen3.5 publishes these two in fp32
        return "fp32"
    return wanted if fits(wanted, weight.shape) else BF16


def weigh_checkpoint(model: Model, directory: Path) -> Weighed:
    """From the headers of a checkpoint on this machine, as `stoker inspect` counts them."""
    from stoker.checkpoint.inspect.report import inspect

    report = inspect(directory)
    if not report.groups:
        raise RequestError(f"{directory} holds no safetensors files to weigh; give --weights to plan from its shapes.")
    mtp = next((group for group in report.groups if group.name == MTP), None)
    mtp_experts = 0
    if mtp and report.step:
        chosen = model.top_k / model.experts if model.experts else 1.0
        head = report.step.items.get(HEAD, 0)
        # draft = MTP - experts + chosen * experts + head
        mtp_experts = round((mtp.bytes - (report.step.draft_bytes - head)) / (1 - chosen)) if chosen < 1 else 0
    return Weighed(
        groups={group.name: group.bytes for group in report.groups},
        mtp_experts=mtp_experts,
        formats={group.name: group.format for group in report.groups},
        title=f"the checkpoint in {directory.name}",
        exact=True,
        tied_head=bool(model.config and model.config.tie_word_embeddings),
    )
