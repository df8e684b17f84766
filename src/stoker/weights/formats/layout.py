"""Which tensors, dtypes and shapes each format has on disk.

Plain Python on (dtype, shape) pairs as safetensors headers spell them; no torch and no values.
The format classes check their tensors through the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from stoker.errors import CheckpointError

Shape = tuple[int, ...]
Parts = Mapping[str, tuple[str, Shape]]  # suffix ("qweight", "weight_scale", ...) -> (dtype, shape)

PLAIN_FORMATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
SUFFIXES = (
    "weight", "weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale",
    "weight_packed", "weight_global_scale", "input_global_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
    "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip

INT4_GROUPS = (128, 64, 32)
FP8_BLOCK = 128
NVFP4_GROUP = 16


INSTEAD = (
    "Use a release of this model in BF16, FP8, GPTQ or AutoRound INT4, compressed-tensors INT4 or NVFP4, or make one "
    "from BF16: stoker build --base BF16_DIR --quantize int4 --out NEW."
)


class UnreadFormat(CheckpointError):
    """The files are whole but in a format that Stoker does not read: fetching them again does not help."""


@dataclass(frozen=True)
class Layout:
    """A format and the logical shape of the weight in it, (out, in) behind any leading expert dimension."""

    format: str
    shape: Shape


def identify(parts: Parts, where: str) -> Layout:
    """The format these tensors are in, decided by which exist and by their dtypes, then checked in full."""
    if "qweight" in parts:
        return int4(parts, where)
    if "weight_packed" in parts:
        return int4_ct(parts, where) if parts["weight_packed"][0] == "I32" else nvfp4_ct(parts, where)
    if "weight" not in parts:
        raise CheckpointError(f"{where} has {_listed(parts)} but no weight: what they scale is missing.")
    dtype = parts["weight"][0]
    if dtype in PLAIN_FORMATS:
        return plain(parts, where)
    if dtype == "U8" and "weight_scale" in parts:
        return nvfp4_modelopt(parts, where)
    if dtype == "I8":
        return int8_row(parts, where)
    if dtype == "F8_E4M3":
        if "weight_scale" not in parts:
            return fp8_block(parts, where)
        shape, scale = parts["weight"][1], parts["weight_scale"][1]
        per_row = (
            len(shape) > 1 and scale in ((*shape[:-1], 1), shape[:-1]) and scale not in (shape[:-2], (*shape[:-2], 1))
        )
        return fp8_row(parts, where) if per_row else fp8_tensor(parts, where)
    raise UnreadFormat(
        f"{where}: {_listed(parts)} is no form Stoker reads: BF16, F16 and F32 stand alone, F8_E4M3, I8 and "
        f"4-bit weights have their scales beside them."
    )


def plain(parts: Parts, where: str) -> Layout:
    _expect_only(parts, where, "plain", required=("weight",))
    _expect_dtype(parts, where, "weight", tuple(PLAIN_FORMATS))
    dtype, shape = parts["weight"]
    return Layout(PLAIN_FORMATS[dtype], shape)


def int4(parts: Parts, where: str) -> Layout:
    _expect_only(parts, where, "INT4", required=("qweight", "scales"), optional=("qzeros", "g_idx"))
    _expect_dtype(parts, where, "qweight", ("I32",))
    _expect_dtype(parts, where, "scales", ("F16",))
    *lead, words, n_out = _at_least_2d(parts, where, "qweight")
    *_, groups, scale_out = _at_least_2d(parts, where, "scales")
    n_in = words * 8
    if scale_out == n_out * 8:
        raise UnreadFormat(
            f"{where}: qweight {_shown(parts['qweight'])} beside scales {_shown(parts['scales'])} is packed "
            f"along the outputs, as AWQ does; Stoker reads the GPTQ order, [in/8, out]."
        )
    if n_in % groups or n_in // groups not in INT4_GROUPS:
        raise UnreadFormat(
            f"{where}: {n_in} inputs in {groups} groups are {n_in / groups:g} inputs per group; "
            f"Stoker reads INT4 in whole groups of 128, 64 or 32."
        )
    _expect_shape(parts, where, "scales", (*lead, groups, n_out))
    if "qzeros" in parts:
        if n_out % 8:
            raise CheckpointError(
                f"{where}: qzeros packs 8 outputs per word and {n_out} is no multiple of 8; keep this layer in 16 bit."
            )
        _expect_dtype(parts, where, "qzeros", ("I32",))
        _expect_shape(parts, where, "qzeros", (*lead, groups, n_out // 8))
    if "g_idx" in parts:
        _expect_dtype(parts, where, "g_idx", ("I32",))
        _expect_shape(parts, where, "g_idx", (*lead, n_in))
    return Layout(f"int4-g{n_in // groups}", (*lead, n_out, n_in))


def int4_ct(parts: Parts, where: str) -> Layout:
    """compressed-tensors' pack-quantized: the codes of `int4`, rows and columns as in the weight itself."""
    if "weight_zero_point" in parts:
        raise UnreadFormat(f"{where}: weight_zero_point makes this asymmetric INT4; Stoker reads symmetric INT4 only.")
    if "weight_g_idx" in parts:
        raise UnreadFormat(
            f"{where}: weight_g_idx reorders the inputs (actorder group); Stoker reads consecutive inputs only."
        )
    _expect_only(parts, where, "INT4 (pack-quantized)", ("weight_packed", "weight_scale"), optional=("weight_shape",))
    _expect_dtype(parts, where, "weight_scale", ("BF16", "F16", "F32"))
    *lead, n_out, words = _at_least_2d(parts, where, "weight_packed")
    n_in, groups = words * 8, _at_least_2d(parts, where, "weight_scale")[-1]
    if (groups > 1 and (n_in % groups or n_in // groups not in INT4_GROUPS)) or n_in % INT4_GROUPS[-1]:
        raise UnreadFormat(
            f"{where}: weight_packed {_shown(parts['weight_packed'])} beside weight_scale "
            f"{_shown(parts['weight_scale'])} would be {n_in} inputs in {groups} groups of {n_in / groups:g}; Stoker "
            f"reads INT4 in whole groups of 128, 64 or 32 or with one scale per row."
        )
    _expect_shape(parts, where, "weight_scale", (*lead, n_out, groups))
    if "weight_shape" in parts:
        _expect_dtype(parts, where, "weight_shape", ("I64", "I32"))
        _expect_shape(parts, where, "weight_shape", (*lead, 2))
    # one group of 32, 64 or 128 inputs is the same as one scale per row
    return Layout("int4-ct-row" if groups == 1 else f"int4-ct-g{n_in // groups}", (*lead, n_out, n_in))


def int8_row(parts: Parts, where: str) -> Layout:
    _expect_only(parts, where, "INT8 per row", required=("weight", "weight_scale"))
    _expect_dtype(parts, where, "weight", ("I8",))
    _expect_dtype(parts, where, "weight_scale", ("F32", "BF16", "F16"))
    shape = _at_least_2d(parts, where, "weight")
    # [out] is read too; [out, 1] is what compressed-tensors writes per channel, and so do we.
    _expect_shape(parts, where, "weight_scale", (*shape[:-1], 1), shape[:-1])
    return Layout("int8-row", shape)


def fp8_block(parts: Parts, where: str) -> Layout:
    _expect_only(parts, where, "FP8 in 128x128 blocks", required=("weight", "weight_scale_inv"))
    _expect_dtype(parts, where, "weight", ("F8_E4M3",))
    _expect_dtype(parts, where, "weight_scale_inv", ("BF16", "F32", "F16"))
    shape = _at_least_2d(parts, where, "weight")
    blocks = tuple(-(-n // FP8_BLOCK) for n in shape[-2:])
    _expect_shape(parts, where, "weight_scale_inv", (*shape[:-2], *blocks))
    return Layout("fp8-b128", shape)


def fp8_tensor(parts: Parts, where: str) -> Layout:
    _expect_only(parts, where, "FP8 per tensor", required=("weight", "weight_scale"), optional=("input_scale",))
    _expect_dtype(parts, where, "weight", ("F8_E4M3",))
    shape = _at_least_2d(parts, where, "weight")
    _expect_scalar(parts, where, "weight_scale", shape[:-2])
    _expect_scalar(parts, where, "input_scale", shape[:-2])
    return Layout("fp8-tensor", shape)


def fp8_row(parts: Parts, where: str) -> Layout:
    _expect_only(parts, where, "FP8 per row", required=("weight", "weight_scale"))
    _expect_dtype(parts, where, "weight", ("F8_E4M3",))
    _expect_dtype(parts, where, "weight_scale", ("F32", "BF16", "F16"))
    shape = _at_least_2d(parts, where, "weight")
    _expect_shape(parts, where, "weight_scale", (*shape[:-1], 1), shape[:-1])
    return Layout("fp8-row", shape)


def nvfp4_ct(parts: Parts, where: str) -> Layout:
    required = ("weight_packed", "weight_scale", "weight_global_scale")
    _expect_only(parts, where, "NVFP4 (compressed-tensors)", required, optional=("input_global_scale",))
    return _nvfp4(parts, where, "nvfp4-ct", "weight_packed", ("weight_global_scale", "input_global_scale"))


def nvfp4_modelopt(parts: Parts, where: str) -> Layout:
    required = ("weight", "weight_scale", "weight_scale_2")
    _expect_only(parts, where, "NVFP4 (ModelOpt)", required, optional=("input_scale",))
    return _nvfp4(parts, where, "nvfp4-modelopt", "weight", ("weight_scale_2", "input_scale"))


def _nvfp4(parts: Parts, where: str, name: str, packed: str, scalars: tuple[str, ...]) -> Layout:
    _expect_dtype(parts, where, packed, ("U8",))
    _expect_dtype(parts, where, "weight_scale", ("F8_E4M3",))
    *lead, n_out, pairs = _at_least_2d(parts, where, packed)
    n_in = pairs * 2
    if n_in % NVFP4_GROUP:
        raise CheckpointError(
            f"{where}: {packed} {_shown(parts[packed])} holds {n_in} inputs, not whole NVFP4 groups of 16."
        )
    _expect_shape(parts, where, "weight_scale", (*lead, n_out, n_in // NVFP4_GROUP))
    for suffix in scalars:
        _expect_scalar(parts, where, suffix, tuple(lead))
    return Layout(name, (*lead, n_out, n_in))


Check = Callable[[Parts, str], Layout]


def _expect_only(
    parts: Parts, where: str, kind: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    for suffix in required:
        if suffix not in parts:
            raise CheckpointError(f"{where}: {kind} needs {' + '.join(required)}, and {suffix} is missing.")
    for suffix in parts:
        if suffix not in required and suffix not in optional:
            raise CheckpointError(
                f"{where}: {suffix} {_shown(parts[suffix])} does not belong beside {required[0]} "
                f"{_shown(parts[required[0]])}, which makes this {kind} ({' + '.join(required)})."
            )


def _expect_dtype(parts: Parts, where: str, suffix: str, allowed: tuple[str, ...]) -> None:
    if parts[suffix][0] not in allowed:
        raise CheckpointError(f"{where}: {suffix} is {parts[suffix][0]}, expected {' or '.join(allowed)}.")


def _expect_shape(parts: Parts, where: str, suffix: str, *allowed: Shape) -> None:
    if parts[suffix][1] not in allowed:
        expected = " or ".join(str(list(shape)) for shape in allowed)
        raise CheckpointError(f"{where}: {suffix} has shape {list(parts[suffix][1])}, expected {expected}.")


def _expect_scalar(parts: Parts, where: str, suffix: str, lead: Shape) -> None:
    """One F32 number per weight matrix; both [] and [1] are in use."""
    if suffix in parts:
        _expect_dtype(parts, where, suffix, ("F32",))
        _expect_shape(parts, where, suffix, lead, (*lead, 1))


def _at_least_2d(parts: Parts, where: str, suffix: str) -> Shape:
    shape = parts[suffix][1]
    if len(shape) < 2 or prod(shape) == 0:
        raise CheckpointError(f"{where}: {suffix} has shape {list(shape)}, expected a matrix that is not empty.")
    return shape


def _shown(part: tuple[str, Shape]) -> str:
    return f"{part[0]} {list(part[1])}"


def _listed(parts: Parts) -> str:
    return ", ".join(f"{suffix} {_shown(part)}" for suffix, part in parts.items())
