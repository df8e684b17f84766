"""Bytes of a network's weights, by group and format: of a scheme applied to its shapes, or as they are stored."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Self

from stoker.errors import RequestError
from stoker.sizes.network import Network, Shape, Weight
from stoker.weights.names import (
    ATTENTION,
    DELTANET,
    DENSE,
    EMBEDDING,
    EXPERTS,
    GROUPS,
    HEAD,
    MTP,
    MTP_FC,
    OTHER,
    ROUTED,
    ROUTER,
    SHARED,
    VISION,
    group_of,
    is_decay_gate,
    is_published_in_fp32,
)

# Bytes of a weight in a storage format include its scales and zero points.

PLAIN = {"bf16": 2, "fp16": 2, "fp32": 4}
GGUF = "gguf:"  # gguf:BITS is an average over a file's mixture of blocks; all other formats are exact
# bits of a weight without its scales: what "lower-bit" means where formats are compared
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8-row": 8, "fp8-b128": 8, "fp8-row": 8, "fp8-tensor": 8,
        "nvfp4": 4, "mxfp4": 4, "int4-g128": 4, "int4-g64": 4, "int4-g32": 4}  # fmt: skip


def weight_bytes(format_name: str, shape: Shape) -> int:
    """`shape` is (out, in) behind any leading dimensions, each of which is stored by itself (experts are)."""
    count = prod(shape)
    if format_name in PLAIN:
        return count * PLAIN[format_name]
    if format_name.startswith(GGUF):
        return ceil(count * float(format_name.removeprefix(GGUF)) / 8)
    if format_name not in BITS:
        raise RequestError(f"unknown weight format {format_name!r}; known: {', '.join(BITS)} and {GGUF}BITS.")
    if len(shape) < 2:
        raise RequestError(f"a weight of shape {list(shape)} is kept in 16 or 32 bit, not in {format_name}.")
    *lead, rows, columns = shape
    return prod(lead) * _matrix_bytes(format_name, rows, columns)


def fits(format_name: str, shape: Shape) -> bool:
    """Whether a checkpoint would store this weight so: vectors and odd shapes stay in 16 bit."""
    if format_name in PLAIN or format_name.startswith(GGUF):
        return True
    if len(shape) < 2 or shape[-2] < 2:
        return False
    if format_name.startswith("int4"):
        return shape[-1] % _group_size(format_name) == 0 and shape[-2] % 32 == 0
    return not (format_name == "nvfp4" and shape[-1] % 16) and not (format_name == "mxfp4" and shape[-1] % 32)


def _matrix_bytes(format_name: str, rows: int, columns: int) -> int:
    if format_name in ("int8-row", "fp8-row"):  # and an fp32 scale per row
        return rows * columns + rows * 4
    if format_name == "fp8-tensor":
        return rows * columns + 4
    if format_name == "fp8-b128":  # and a bf16 scale per 128 x 128
        return rows * columns + 2 * ceil(rows / 128) * ceil(columns / 128)
    if format_name == "nvfp4":  # e4m3 scale per 16, two fp32 scales per weight: its own and its input's
        return rows * columns // 2 + rows * columns // 16 + 8
    if format_name == "mxfp4":  # an exponent per 32
        return rows * columns // 2 + rows * columns // 32
    groups = ceil(columns / _group_size(format_name))  # INT4: fp16 scale and 4-bit zero point per group
    return rows * columns // 2 + groups * rows * 2 + groups * rows // 2


def _group_size(format_name: str) -> int:
    return int(format_name.removeprefix("int4-g"))


FEEDING = "recurrent layers before attention"  # a part of their own: some files keep them in 16 bit
# names used in weights.toml -> groups of `stoker inspect`
GROUP_KEYS = {"routed": ROUTED, "shared": SHARED, "dense": DENSE, "deltanet": DELTANET, "attention": ATTENTION,
              "head": HEAD, "embedding": EMBEDDING, "router": ROUTER, "feeding": FEEDING}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint stores each part of a network."""

    key: str
    title: str
    parts: Mapping[str, str]  # routed, shared, ... -> format
    mtp: str = "bf16"
    not_gates: bool = False
    approximate: bool = False

    def format_of(self, weight: Weight) -> str:
        key = next((key for key, group in GROUP_KEYS.items() if group == weight.part), "")
        wanted = self.parts.get(key, self.parts.get("deltanet", "bf16") if key == "feeding" else "bf16")
        if weight.group == MTP and (self.mtp != "trunk" or weight.name == MTP_FC):
            wanted = "bf16"
        if self.not_gates and is_decay_gate(weight.name):
            wanted = "bf16"
        if is_published_in_fp32(weight.name):
            return "fp32"
        return wanted if fits(wanted, weight.shape) else "bf16"


@dataclass(frozen=True)
class WeightBytes:
    """By group; of the MTP head, its experts apart, of which a draft reads a few."""

    groups: Mapping[str, int]
    mtp_experts: int
    formats: Mapping[str, str]  # group -> the format most of its bytes are in
    title: str = ""
    exact: bool = True  # False: averages of a mixed file

    @classmethod
    def of(cls, network: Network, scheme: Scheme) -> Self:
        """Of a network whose parts are stored as `scheme` says."""

        def layers() -> Iterator[tuple[str, str, int, bool]]:
            for weight in network.weights:
                kind = scheme.format_of(weight)
                yield weight.group, kind, weight.count * weight_bytes(kind, weight.shape), weight.part == ROUTED
            if network.vision_parameters and not scheme.approximate:  # GGUF files keep vision apart
                yield VISION, "bf16", 2 * network.vision_parameters, False

        return cls._sum(layers(), scheme.title, not scheme.approximate)

    @classmethod
    def stored(cls, layers: Iterable[tuple[str, str, int]], title: str = "") -> Self:
        """Of layers as they lie in files or in memory: module name, format and bytes of each."""
        return cls._sum(((group_of(name), kind, size, EXPERTS in name) for name, kind, size in layers), title)

    @classmethod
    def _sum(cls, layers: Iterable[tuple[str, str, int, bool]], title: str, exact: bool = True) -> Self:
        """Each layer's group, format and bytes, and whether it is routed experts."""
        sizes: dict[str, int] = {}
        kinds: dict[str, dict[str, int]] = {}
        mtp_experts = 0
        for group, kind, size, experts in layers:
            sizes[group] = sizes.get(group, 0) + size
            by_format = kinds.setdefault(group, {})
            by_format[kind] = by_format.get(kind, 0) + size
            if group == MTP and experts:
                mtp_experts += size
        return cls(
            groups={group: sizes[group] for group in GROUPS if group in sizes},
            mtp_experts=mtp_experts,
            formats={group: max(found, key=found.__getitem__) for group, found in kinds.items()},
            title=title,
            exact=exact,
        )

    @property
    def total(self) -> int:
        return sum(self.groups.values())

    @property
    def head(self) -> int:
        """A tied head is the embedding."""
        return self.groups.get(HEAD, self.groups.get(EMBEDDING, 0))

    @property
    def fixed(self) -> dict[str, int]:
        """What every verify step reads whole, however many tokens it verifies."""
        skip = (ROUTED, EMBEDDING, MTP, VISION, OTHER, HEAD)
        return {**{group: size for group, size in self.groups.items() if group not in skip}, HEAD: self.head}

    def expert(self, experts: int) -> int:
        """One of the routed experts, in every layer."""
        return self.groups.get(ROUTED, 0) // experts if experts else 0

    def mtp_read(self, top_k: int, experts: int) -> int:
        """Of the MTP head, what one token reads: a few of its experts, and all else."""
        return self.mtp_fixed + (self.mtp_experts * top_k // experts if experts else 0)

    @property
    def mtp_fixed(self) -> int:
        """Of the MTP head, what every draft reads whole."""
        return self.groups.get(MTP, 0) - self.mtp_experts
