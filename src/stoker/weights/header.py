"""The header of a safetensors file: names, dtypes, shapes and places, checked against the file's size. No torch."""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str  # as in the header: BF16, F32, I32, ...
    shape: tuple[int, ...]
    file: Path
    offset: int  # first byte in the file
    nbytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of one file; an error names the file and what does not add up."""
    try:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            announced = file.read(8)
            length = int.from_bytes(announced, "little")
            if len(announced) < 8 or length > MAX_HEADER or 8 + length > size:
                raise CheckpointError(
                    f"{path} is not a whole safetensors file: it has {size:,} bytes"
                    + (f" and announces a header of {length:,}" if len(announced) == 8 else ", expected at least 8")
                    + "; fetch the file again."
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); fetch the file again.") from None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise CheckpointError(f"{path} has a header that is not JSON ({reason}); fetch the file again.") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} has a header that is a JSON {type(raw).__name__}, expected an object.")
    raw.pop("__metadata__", None)
    return {name: _tensor(path, size, 8 + length, name, entry) for name, entry in raw.items()}


def _tensor(path: Path, size: int, data: int, name: str, entry: Any) -> TensorInfo:
    if not name.isprintable():
        raise CheckpointError(f"{path}: the tensor name {name[:80]!r} has characters that no tensor name has.")
    if not _well_formed(entry):
        raise CheckpointError(f"{path}: the header entry of {name} is malformed: {repr(entry)[:120]}.")
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype[:20]!r}, expected one of {', '.join(ITEM_SIZES)}.")
    if data + end > size:
        raise CheckpointError(
            f"{path} is cut short: {name} ends at byte {data + end:,} and the file has {size:,}; fetch the file again."
        )
    if end - begin != prod(shape) * ITEM_SIZES[dtype]:
        raise CheckpointError(
            f"{path}: {name} of shape {list(shape)} in {dtype} does not fill the {end - begin:,} bytes "
            "its header gives it; fetch the file again."
        )
    return TensorInfo(name, dtype, shape, path, data + begin, end - begin)


def _well_formed(entry: Any) -> bool:
    """{"dtype": str, "shape": sizes, "data_offsets": [begin, end]}, all numbers whole and within 63 bits."""

    def sizes(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)

    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape", ()), entry.get("data_offsets", ())
    if not sizes(shape) or not sizes(offsets):
        return False
    return len(shape) <= 16 and len(offsets) == 2 and offsets[0] <= offsets[1]
