"""What the wrappers of the step kernels share: launch settings, workspace, checks by name."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from stoker.backends.gpu.packed import GROUP, UNIT, Kind, PackedWeight

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_TOKENS = 128  # rows of a step
COUNTERS_APART = 32  # a cache line, so that programs which count do not all go to one part of the cache
APART = tl.constexpr(COUNTERS_APART)
UNROLL = 8  # groups of a slice in straight-line code; longer slices loop


@dataclass(frozen=True)
class Card:
    """What the settings of a launch depend on."""

    capability: tuple[int, int]
    multiprocessors: int


_assumed: Card | None = None  # while kernels are compiled for a card that this process does not use


@contextmanager
def assumed(card: Card) -> Iterator[None]:
    """Launches inside are made for this card, on tensors without memory."""
    global _assumed
    before, _assumed = _assumed, card
    try:
        yield
    finally:
        _assumed = before


def is_assumed() -> bool:
    return _assumed is not None


@cache
def card(device: torch.device) -> Card:
    """A real one."""
    found = torch.cuda.get_device_properties(device)
    return Card((found.major, found.minor), found.multi_processor_count)


@dataclass(frozen=True)
class Workspace:
    """Memory that kernels of one stream use in turn, so that none is allocated in a step."""

    partial: Tensor  # fp32: sums of programs that share a row's inputs
    counters: Tensor  # [n, COUNTERS_APART] int32, zero between launches: programs done, in column 0

    @classmethod
    def allocate(cls, partial: int, counters: int, device: torch.device | str) -> "Workspace":
        return cls(
            torch.empty(max(1, partial), dtype=torch.float32, device=device),
            torch.zeros(max(1, counters), COUNTERS_APART, dtype=torch.int32, device=device),
        )


def slice_count(groups: int) -> int:
    """Warps that share a row's inputs."""
    return next(s for s in (4, 2, 1) if groups % s == 0)


def chunk_size(groups: int) -> int:
    return next(c for c in range(min(UNROLL, groups), 0, -1) if groups % c == 0)


def register_limit(count: int) -> dict[str, int]:
    """Lets NVIDIA's assembler spend registers on loads in flight; it saves them otherwise."""
    return {} if torch.version.hip else {"maxnreg": count}


def arithmetic(device: torch.device) -> dict[str, Any]:
    """PTX conversion where bf16x2 arithmetic exists; the interpreter has no bf16 arithmetic and multiplies in fp32.

    Fused multiply-adds are written out, so the compiler is told to form none of its own.
    """
    if INTERPRETED:
        return {"PTX": False, "DOT": tl.float32}
    return {"PTX": _hopper(device), "DOT": tl.bfloat16, "enable_fp_fusion": False}


def dependent(device: torch.device, on: bool) -> dict[str, Any]:
    """Programmatic dependent launch: the kernel may start while the one before it ends, and waits inside."""
    on = on and not INTERPRETED and _hopper(device)
    return {"PDL": on} | ({"launch_pdl": True} if on else {})


def _hopper(device: torch.device) -> bool:
    return torch.version.hip is None and (_assumed or card(device)).capability >= (9, 0)


def pick(device: torch.device, large: dict[str, Any], little: dict[str, Any], amd: dict[str, Any]) -> dict[str, Any]:
    """Settings for a GPU with 227 KB of shared memory, for those of NVIDIA with 99 KB, and for AMD's."""
    if torch.version.hip:
        return amd
    return large if INTERPRETED or (_assumed or card(device)).capability[0] in (9, 10) else little


def multiprocessors(device: torch.device) -> int:
    return 4 if INTERPRETED else (_assumed or card(device)).multiprocessors


def weight_shape(weight: PackedWeight) -> dict[str, Any]:
    return {"KIND": int(weight.kind), "ROWS": weight.rows, "IN": weight.in_features}


def weight_tensors(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.packed, weight.scales, weight.row_scales


def check(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, like: Tensor) -> None:
    """None in `shape` stands for any size."""
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be [{wanted}], found {list(found)}.")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, found {tensor.dtype}.")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} like the others, found {tensor.device}.")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()} for {list(found)}.")


def check_tokens(x: Tensor, in_features: int) -> None:
    if x.dim() != 2 or x.shape[1] != in_features:
        raise ValueError(f"x must be [tokens, {in_features}], found {list(x.shape)}.")
    if not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must have 1 to {MAX_TOKENS} rows, found {x.shape[0]}; more belong to prefill.")
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x must be torch.bfloat16, found {x.dtype}.")
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, found strides {x.stride()} for {list(x.shape)}.")
    if not (x.is_cuda or INTERPRETED or is_assumed()):
        raise ValueError(f"x must be on a GPU, found {x.device}; the reference runs elsewhere.")


def check_weight(name: str, weight: PackedWeight, like: Tensor, experts: bool = False) -> None:
    """Shapes and dtypes follow from the number of rows and inputs."""
    lead: tuple[int | None, ...] = (None,) if experts else ()
    units, groups = weight.rows // UNIT, weight.in_features // GROUP
    kind = weight.kind
    packed = torch.bfloat16 if kind is Kind.BF16 else torch.int16
    check(f"{name}.packed", weight.packed, (*lead, units, groups, kind.tiles, 16, 32), packed, like)
    if kind is Kind.INT4:
        check(f"{name}.scales", weight.scales, (*lead, groups, weight.rows), torch.float16, like)
    elif kind is Kind.FP8:
        check(f"{name}.scales", weight.scales, (*lead, groups, units), torch.float32, like)
    elif kind is Kind.NVFP4:
        check(f"{name}.scales", weight.scales, (*lead, units, groups, 64), torch.int32, like)
    if kind in (Kind.INT8, Kind.NVFP4):
        check(f"{name}.row_scales", weight.row_scales, (*lead, weight.rows), torch.float32, like)


def check_workspace(workspace: Workspace, partial: int, counters: int) -> None:
    if workspace.partial.numel() < partial or len(workspace.counters) < counters:
        raise ValueError(
            f"the workspace has {workspace.partial.numel()} partial sums and {len(workspace.counters)} counters, "
            f"this launch needs {partial} and {counters}."
        )
