"""The bytes of one tensor, from its place in a safetensors file into memory."""

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stoker.errors import CheckpointError
from stoker.weights.header import TensorInfo

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "U8": torch.uint8,
}


def read_tensor(info: TensorInfo) -> Tensor:
    """One tensor on the CPU, in the dtype of the file."""
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{info.file}: {info.name} is stored in {info.dtype}; Stoker reads only {', '.join(DTYPES)} so far."
        )
    buffer = bytearray(info.nbytes)
    view, got = memoryview(buffer), 0
    descriptor = os.open(info.file, os.O_RDONLY)
    try:
        while got < info.nbytes:
            count = os.preadv(descriptor, [view[got:]], info.offset + got)
            if count == 0:
                raise CheckpointError(
                    f"{info.file} ended while reading {info.name}: {got:,} of {info.nbytes:,} bytes; fetch it again."
                )
            got += count
    finally:
        os.close(descriptor)
    if not buffer:
        return torch.empty(info.shape, dtype=DTYPES[info.dtype])
    return torch.frombuffer(buffer, dtype=DTYPES[info.dtype]).view(info.shape)


Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def read_tensors(
    infos: Sequence[TensorInfo],
    *,
    into: Callable[[TensorInfo], Tensor | None] | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[TensorInfo, Tensor]]:
    total, done = sum(info.nbytes for info in infos), 0
    for info in infos:
        tensor = read_tensor(info)
        place = into(info) if into else None
        if place is not None:
            place.copy_(tensor)
        done += info.nbytes
        if progress:
            progress(done, total)
        yield info, tensor if place is None else place
