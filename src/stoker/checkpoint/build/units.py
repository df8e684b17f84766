"""The smallest steps of a build: tensors copied as they are, and layers turned into another format. No torch.

A unit names what it reads and what it writes, down to dtypes and shapes, so that every output file is laid out before
a value is read. `convert` carries units out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from stoker.weights.formats.layout import FP8_BLOCK, PLAIN_FORMATS, Shape
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.headers import ITEM_SIZES, TensorInfo
from stoker.weights.names import module_of

PLAIN_DTYPES = {name: dtype for dtype, name in PLAIN_FORMATS.items()}  # "bf16" -> "BF16"


@dataclass(frozen=True)
class Out:
    """A tensor of the result."""

    name: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of a stored layer.

    A plain layer of any shape counts as one matrix of all its rows; a quantised one with an expert dimension has a
    `matrix` per expert, since blocks of scales do not cross from one to the next.
    """

    layer: LayerFormat
    tensors: Mapping[str, TensorInfo]  # suffix -> where it lies
    start: int
    stop: int
    matrix: int = 0

    @property
    def columns(self) -> int:
        return self.layer.shape[-1] if self.layer.shape else 1

    @property
    def where(self) -> str:
        return f"{next(iter(self.tensors.values())).file}: {self.layer.name}"


@dataclass(frozen=True)
class Copy:
    """One tensor, byte for byte, perhaps under another name."""

    info: TensorInfo
    out: Out

    @property
    def outputs(self) -> tuple[Out, ...]:
        return (self.out,)


@dataclass(frozen=True)
class Convert:
    """Rows of one or more layers, concatenated and converted to another format."""

    rows: tuple[Rows, ...]
    format: str
    outputs: tuple[Out, ...]


Unit = Copy | Convert


def copies(tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> list[Copy]:
    """A copy of every tensor (suffix -> info) under its new name (suffix -> name)."""
    return [Copy(info, Out(names[suffix], info.dtype, info.shape)) for suffix, info in tensors.items()]


def flat_rows(shape: Shape) -> int:
    return prod(shape[:-1])


def whole(layer: LayerFormat, tensors: Mapping[str, TensorInfo]) -> tuple[Rows, ...]:
    """All rows of a layer, in order."""
    if layer.format in PLAIN_DTYPES:
        return (Rows(layer, tensors, 0, flat_rows(layer.shape)),)
    return tuple(Rows(layer, tensors, 0, layer.shape[-2], matrix) for matrix in range(prod(layer.shape[:-2])))


def outputs_of(name: str, shape: Shape, format: str) -> tuple[Out, ...]:
    """The tensors that a weight has in a format `convert` writes; `name` is that of the plain tensor."""
    if format in PLAIN_DTYPES:
        return (Out(name, PLAIN_DTYPES[format], shape),)
    module, (n_out, n_in) = module_of(name), shape
    parts: dict[str, tuple[str, Shape]]
    if format == "int8-row":
        parts = {"weight": ("I8", shape), "weight_scale": ("F32", (n_out, 1))}
    elif format == "fp8-b128":
        blocks = (-(-n_out // FP8_BLOCK), -(-n_in // FP8_BLOCK))
        parts = {"weight": ("F8_E4M3", shape), "weight_scale_inv": ("BF16", blocks)}
    else:
        groups = n_in // int4_group(format)
        parts = {
            "qweight": ("I32", (n_in // 8, n_out)),
            "scales": ("F16", (groups, n_out)),
            "qzeros": ("I32", (groups, n_out // 8)),
        }
    return tuple(Out(f"{module}.{suffix}", dtype, size) for suffix, (dtype, size) in parts.items())


def int4_group(format: str) -> int:
    return int(format.removeprefix("int4-g"))


def unfit(shape: Shape, format: str) -> str:
    """Why a matrix cannot be stored in this format; empty if it can."""
    if format.startswith("int4"):
        group = int4_group(format)
        if shape[-1] % group:
            return f"its inputs do not divide into groups of {group}"
        if shape[-2] % 8:
            return "its outputs are no multiple of 8"
    return ""
