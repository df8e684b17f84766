"""A few values of a stored weight, dequantised with numpy from small reads at spots spread over the tensor. No torch.

The format classes are the reference for whole tensors; this reads a few kilobytes, enough to tell weights from
zeros, NaN or noise.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from stoker.weights.formats.layout import FP8_BLOCK, NVFP4_GROUP, PLAIN_FORMATS
from stoker.weights.formats.rules import LayerFormat
from stoker.weights.headers import ITEM_SIZES, Reads, TensorInfo

SPOTS = 4
Values = NDArray[np.float32]
Parts = Mapping[str, TensorInfo]  # suffix -> tensor


def sample(layer: LayerFormat, tensors: Mapping[str, TensorInfo], reads: Reads, spot_bytes: int) -> list[Values]:
    """Dequantised values at up to SPOTS places, each of about `spot_bytes` of the weight's file."""
    parts = {suffix: tensors[name] for suffix, name in layer.tensors.items()}
    with np.errstate(all="ignore"):  # broken scales give NaN and Inf, which the caller judges
        return _SAMPLERS[layer.format.partition("-g")[0]](layer, parts, reads, spot_bytes)


def decode(dtype: str, data: bytes) -> Values:
    """The bytes of a float or int8 tensor as fp32."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(data, np.uint8)]
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "I8": "i1"}[dtype]).astype(np.float32)


def _plain(layer: LayerFormat, parts: Parts, reads: Reads, spot_bytes: int) -> list[Values]:
    weight = parts["weight"]
    return [_values(weight, spot, reads) for spot in _spots(weight, spot_bytes)]


def _fp8_block(layer: LayerFormat, parts: Parts, reads: Reads, spot_bytes: int) -> list[Values]:
    weight, scales = parts["weight"], parts["weight_scale_inv"]
    n_out, n_in = layer.shape[-2:]
    scale = _all(scales, reads).reshape(-1, *scales.shape[-2:])  # [lead, out/128, in/128]
    values = []
    for spot in _spots(weight, spot_bytes):
        row, column = np.divmod(np.arange(spot.start, spot.stop), n_in)
        lead, row = np.divmod(row, n_out)
        values.append(_values(weight, spot, reads) * scale[lead, row // FP8_BLOCK, column // FP8_BLOCK])
    return values


def _one_scale_per(elements: Callable[[LayerFormat], int]) -> Callable[..., list[Values]]:
    """FP8 per tensor or row and INT8 per row: `elements` consecutive values share a scale."""

    def sampler(layer: LayerFormat, parts: Parts, reads: Reads, spot_bytes: int) -> list[Values]:
        weight, each, scale = parts["weight"], elements(layer), _all(parts["weight_scale"], reads)
        return [
            _values(weight, spot, reads) * scale[np.arange(spot.start, spot.stop) // each]
            for spot in _spots(weight, spot_bytes)
        ]

    return sampler


def _int4(layer: LayerFormat, parts: Parts, reads: Reads, spot_bytes: int) -> list[Values]:
    words, scales = parts["qweight"], parts["scales"]
    n_out, group = words.shape[-1], words.shape[-2] * 8 // scales.shape[-2]
    rows = words.nbytes // 4 // n_out
    count = min(n_out, max(spot_bytes // 4, 1))
    values = []
    for j in range(SPOTS):  # a spot stays within one row of words, whose eight inputs share a row of scales
        row, column = (rows - 1) * j // (SPOTS - 1), (n_out - count) * j // (SPOTS - 1)
        packed = np.frombuffer(_bytes(words, range(row * n_out + column, row * n_out + column + count), reads), "<u4")
        first = row * 8 // group * n_out + column
        nibbles = (packed[None, :] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None]) & 0xF  # [8, count]
        values.append(((nibbles.astype(np.float32) - 8) * _values(scales, range(first, first + count), reads)).ravel())
    return values


def _int4_ct(layer: LayerFormat, parts: Parts, reads: Reads, spot_bytes: int) -> list[Values]:
    words, scales = parts["weight_packed"], parts["weight_scale"]
    per_scale = words.shape[-1] // scales.shape[-1]  # words
    values = []
    for spot in _spots(words, spot_bytes):
        packed = np.frombuffer(_bytes(words, spot, reads), "<u4")
        nibbles = (packed[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 0xF  # [count, 8]
        first, last = spot.start // per_scale, (spot.stop - 1) // per_scale
        scale = _values(scales, range(first, last + 1), reads)[np.arange(spot.start, spot.stop) // per_scale - first]
        values.append(((nibbles.astype(np.float32) - 8) * scale[:, None]).ravel())
    return values


def _nvfp4(packed_name: str, global_name: str, divides: bool) -> Callable[..., list[Values]]:
    def sampler(layer: LayerFormat, parts: Parts, reads: Reads, spot_bytes: int) -> list[Values]:
        packed, scales = parts[packed_name], parts["weight_scale"]
        factor = _all(parts[global_name], reads)
        if divides:
            factor = np.float32(1) / factor
        per_matrix = layer.shape[-2] * layer.shape[-1]
        values = []
        for spot in _spots(packed, spot_bytes):
            codes = np.frombuffer(_bytes(packed, spot, reads), np.uint8)
            value = _E2M1[np.stack((codes & 0xF, codes >> 4), axis=-1).ravel()]
            element = np.arange(2 * spot.start, 2 * spot.stop)  # of the unpacked weight, low nibble first
            first = 2 * spot.start // NVFP4_GROUP
            scale = _values(scales, range(first, (2 * spot.stop - 1) // NVFP4_GROUP + 1), reads)
            values.append(value * scale[element // NVFP4_GROUP - first] * factor[element // per_matrix])
        return values

    return sampler


def _spots(info: TensorInfo, spot_bytes: int) -> list[range]:
    """Element ranges spread from the first to the last element; one range if the tensor is small."""
    size = ITEM_SIZES[info.dtype]
    total, count = info.nbytes // size, max(spot_bytes // size, 1)
    if total <= SPOTS * count:
        return [range(total)]
    starts = [(total - count) * j // (SPOTS - 1) for j in range(SPOTS)]
    return [range(start, start + count) for start in starts]


def _bytes(info: TensorInfo, elements: range, reads: Reads) -> bytes:
    size = ITEM_SIZES[info.dtype]
    return reads(info.file, info.offset + elements.start * size, len(elements) * size)


def _values(info: TensorInfo, elements: range, reads: Reads) -> Values:
    return decode(info.dtype, _bytes(info, elements, reads))


def _all(info: TensorInfo, reads: Reads) -> Values:
    return _values(info, range(info.nbytes // ITEM_SIZES[info.dtype]), reads)


def _e4m3_table() -> Values:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 0xF, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3_table()
_E2M1 = np.array([s * v for s in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], dtype=np.float32)
_SAMPLERS: dict[str, Callable[..., list[Values]]] = {
    **dict.fromkeys(PLAIN_FORMATS.values(), _plain),
    "int4": _int4,
    "int8-row": _one_scale_per(lambda layer: layer.shape[-1]),
    "fp8-b128": _fp8_block,
    "int4-ct": _int4_ct,
    "int4-ct-row": _int4_ct,
    "fp8-row": _one_scale_per(lambda layer: layer.shape[-1]),
    "fp8-tensor": _one_scale_per(lambda layer: layer.shape[-2] * layer.shape[-1]),
    "nvfp4-ct": _nvfp4("weight_packed", "weight_global_scale", divides=True),
    "nvfp4-modelopt": _nvfp4("weight", "weight_scale_2", divides=False),
}
