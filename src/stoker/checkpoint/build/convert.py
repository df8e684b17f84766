"""Carries out units: reads rows, dequantises or quantises them, and yields the values of the result piece by piece.

No step holds more than a block of rows in fp32 (and, for INT4, the packed matrix), whatever the layer's size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from stoker.checkpoint.build.units import PLAIN_DTYPES, Convert, Rows, int4_group
from stoker.weights.formats import format_class
from stoker.weights.formats.fp8 import Fp8Block
from stoker.weights.formats.int4 import Int4
from stoker.weights.formats.int8 import Int8Row
from stoker.weights.formats.layout import FP8_BLOCK, Shape
from stoker.weights.headers import TensorInfo
from stoker.weights.reader import DTYPES, read_tensor

# A block of n elements costs up to about this much memory per element, in fp32 and its temporaries (measured).
BYTES_PER_ELEMENT = 64


def block_elements(memory: int) -> int:
    """How many weights fit in memory at a time; half of `memory` is left to the runtime and to packed results."""
    return memory // 2 // BYTES_PER_ELEMENT


def pieces(unit: Convert, block: int) -> Iterator[tuple[str, Tensor]]:
    """Tensor name and its next values, in order; together they fill the unit's outputs exactly."""
    if unit.format in PLAIN_DTYPES:
        dtype = DTYPES[PLAIN_DTYPES[unit.format]]
        for rows in unit.rows:
            for values in dequantized(rows, block, dtype):
                yield unit.outputs[0].name, values
    elif unit.format.startswith("int4"):
        yield from _int4(unit, block)
    else:
        yield from _scaled_rows(unit, block)


def dequantized(rows: Rows, block: int, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """Blocks of rows as [n, in]; plain layers keep their own dtype unless another is asked for."""
    step = max(FP8_BLOCK, block // rows.columns // FP8_BLOCK * FP8_BLOCK)
    cls = format_class(rows.layer.format)
    if rows.layer.format.startswith(
        "int4-g"
    ):  # packed along the inputs: a block of outputs is scattered over the whole tensor
        packed = {suffix: read_tensor(_matrix(info, rows)) for suffix, info in rows.tensors.items()}
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        if rows.layer.format.startswith("int4-g"):
            tensors = {suffix: _columns(suffix, tensor, start, stop) for suffix, tensor in packed.items()}
        else:
            tensors = {
                suffix: read_tensor(_slice(suffix, _matrix(info, rows), rows, start, stop))
                for suffix, info in rows.tensors.items()
                if suffix != "weight_shape"  # it describes the whole weight
            }
        weight = cls.from_tensors(tensors, rows.where)
        yield weight.dequantize(dtype or (torch.float32 if len(tensors) > 1 else tensors["weight"].dtype))


def _matrix(info: TensorInfo, rows: Rows) -> TensorInfo:
    """The part of a stacked tensor that belongs to one matrix; a plain tensor as rows of its last dimension."""
    if rows.layer.format in PLAIN_DTYPES:
        return replace(info, shape=(prod(info.shape[:-1]), rows.columns))
    lead = rows.layer.shape[:-2]
    nbytes = info.nbytes // prod(lead)
    shape: Shape = info.shape[len(lead) :]
    return replace(info, shape=shape, offset=info.offset + rows.matrix * nbytes, nbytes=nbytes)


def _slice(suffix: str, info: TensorInfo, rows: Rows, start: int, stop: int) -> TensorInfo:
    """Some rows of a tensor that is stored row by row; a scale of the whole tensor is returned as it is."""
    if suffix == "weight_scale_inv":
        start, stop = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
    elif suffix not in ("weight", "weight_packed") and info.shape[:1] != rows.layer.shape[-2:-1]:
        return info
    row = info.nbytes // info.shape[0]
    return replace(
        info, shape=(stop - start, *info.shape[1:]), offset=info.offset + start * row, nbytes=(stop - start) * row
    )


def _columns(suffix: str, tensor: Tensor, start: int, stop: int) -> Tensor:
    if suffix == "g_idx":
        return tensor
    return tensor[:, start // 8 : stop // 8] if suffix == "qzeros" else tensor[:, start:stop]


def _int4(unit: Convert, block: int) -> Iterator[tuple[str, Tensor]]:
    """INT4 is packed along the inputs, so the whole packed matrix is assembled before it is written."""
    group = int4_group(unit.format)
    whole = {out.name: torch.empty(out.shape, dtype=DTYPES[out.dtype]) for out in unit.outputs}
    names = _by_suffix(unit)
    row = 0
    for rows in unit.rows:
        for values in dequantized(rows, block):
            part = Int4.quantize(values, group=group, where=rows.where)
            stop = row + values.shape[0]
            for suffix, tensor in part.tensors().items():
                _columns(suffix, whole[names[suffix]], row, stop).copy_(tensor)
            row = stop
    yield from whole.items()


def _scaled_rows(unit: Convert, block: int) -> Iterator[tuple[str, Tensor]]:
    """FP8 and INT8 are stored row by row: weights are streamed, and their few scales follow."""
    names = _by_suffix(unit)
    scale = "weight_scale" if unit.format == "int8-row" else "weight_scale_inv"
    scales = []
    for rows in unit.rows:
        for values in dequantized(rows, block):
            part = _quantize(unit.format, values, rows.where)
            yield names["weight"], part["weight"]
            scales.append(part[scale])
    yield names[scale], torch.cat(scales)


def _quantize(format: str, values: Tensor, where: str) -> dict[str, Tensor]:
    if format == "int8-row":
        return Int8Row.quantize(values, where=where).tensors()
    return Fp8Block.quantize(values, where=where).tensors()


def _by_suffix(unit: Convert) -> Mapping[str, str]:
    return {out.name.rpartition(".")[2]: out.name for out in unit.outputs}
