"""The header of a safetensors file: names, dtypes, shapes and places, checked against the file's size. No torch."""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

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
    size = os.path.getsize(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else size
        if size < 8 or length > MAX_HEADER or 8 + length > size:
            raise CheckpointError(
                f"{path} is not a whole safetensors file: it has {size:,} bytes and its first 8 announce a header "
                f"of {length:,}; fetch the file again."
            )
        try:
            raw = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a header that is not JSON ({error}); fetch the file again.") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} has a header that is a JSON {type(raw).__name__}, expected an object.")
    raw.pop("__metadata__", None)
    return {name: _tensor(path, size, 8 + length, name, entry) for name, entry in raw.items()}


def _tensor(path: Path, size: int, data: int, name: str, entry: object) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])  # type: ignore[index]
        begin, end = (int(n) for n in entry["data_offsets"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header entry of {name} is malformed: {entry!r}.") from None
    if dtype not in ITEM_SIZES:
        raise CheckpointError(f"{path}: {name} has dtype {dtype}, expected one of {', '.join(ITEM_SIZES)}.")
    expected = prod(shape) * ITEM_SIZES[dtype]
    if end - begin != expected or begin < 0:
        raise CheckpointError(
            f"{path}: {name} of shape {list(shape)} in {dtype} needs {expected:,} bytes, "
            f"its header gives {end - begin:,}."
        )
    if data + end > size:
        raise CheckpointError(
            f"{path} is cut short: {name} ends at byte {data + end:,} and the file has {size:,}; fetch the file again."
        )
    return TensorInfo(name, dtype, shape, path, data + begin, end - begin)
