"""Bytes of tensors, and giving them back to the system."""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensor_bytes(holder: Any) -> int:
    """Bytes of all tensors in a dataclass, or in a tuple or list of them. Memory that several lie in counts once."""
    parts = [tensor.untyped_storage() for tensor in _tensors(holder)]
    return sum({part._cdata: part.nbytes() for part in parts}.values())


def _tensors(holder: Any) -> Iterator[Tensor]:
    parts: Iterable[Any] = holder if isinstance(holder, tuple | list) else ()
    if isinstance(holder, Tensor):
        yield holder
    elif is_dataclass(holder):
        parts = [getattr(holder, field.name) for field in fields(holder)]
    for part in parts:
        yield from _tensors(part)


def discard(tensors: Iterable[Tensor], rows: Sequence[int]) -> int:
    """Gives the memory of these rows back to the system; they read as zeros from then on. Returns how many bytes.

    Only whole pages of host memory can be given back, and only Linux is asked to.
    """
    if sys.platform != "linux":
        return 0
    page, given = mmap.PAGESIZE, 0
    libc = ctypes.CDLL(None)
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        row = tensor.stride(0) * tensor.itemsize
        for first, count in _ranges(rows):
            start = tensor.data_ptr() + first * row
            aligned = -(-start // page) * page
            length = (start + count * row - aligned) // page * page
            if length > 0 and not libc.madvise(ctypes.c_void_p(aligned), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
                given += length
    return given


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs: first and count."""
    start = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[start], place - start
            start = place
