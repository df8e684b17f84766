"""Files with tensors of chosen sizes at chosen places, and filesystems without direct reads, to test reading."""

import errno
import fcntl
import os
import random
import threading
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.weights import reader as read
from stoker.weights.headers import TensorInfo
from stoker.weights.reader import read_tensors

MB = 1 << 20
REQUEST, WINDOW = 256 << 10, 2 << 20  # smaller than in use, for smaller files
# Smaller and larger than a page and a request, and lengths that move the next tensor off every boundary.
SIZES = [1, 0, 2, 7, PAGESIZE, PAGESIZE - 8, 100_001, REQUEST // 2, 8, 3 * REQUEST + 12_345, REQUEST, 0, REQUEST + 1, 5]


def write(path: Path, sizes: list[int], start: int = 1000, gaps: list[int] | None = None) -> list[TensorInfo]:
    """A file of noise (or, from 16 MB on, of holes), and U8 tensors of these sizes in it, from byte `start` on."""
    infos, offset = [], start
    for number, size in enumerate(sizes):
        offset += gaps[number] if gaps else 0
        infos.append(TensorInfo(f"{path.stem}.{number}", "U8", (size,), path, offset, size))
        offset += size
    with path.open("wb") as file:
        file.write(random.Random(offset).randbytes(min(offset, 16 * MB)))
        os.fsync(file.fileno())  # dirty pages cannot be dropped from the cache
        file.truncate(offset)
    return infos


def expected(info: TensorInfo) -> bytes:
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return file.read(info.nbytes)


def content(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def drain(infos: list[TensorInfo], **options: Any) -> int:
    return sum(1 for _ in read_tensors(infos, **options))


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "stoker-read"]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused_direct(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """A filesystem that answers EINVAL to O_DIRECT, when opening or only when reading."""
    really_open, really_read = os.open, os.preadv
    direct_flag = os.O_DIRECT

    def refuse() -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def fake_open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & direct_flag:
            refuse()
        return really_open(path, flags, *rest, **more)

    def fake_read(descriptor: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & direct_flag:
            refuse()
        return really_read(descriptor, buffers, offset)

    if at == "open":
        monkeypatch.setattr(os, "open", fake_open)
    else:
        monkeypatch.setattr(os, "preadv", fake_read)


@pytest.fixture(params=["direct", "refused by open", "refused by read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "direct":
        refused_direct(monkeypatch, request.param.split()[-1])
    return str(request.param)


@pytest.fixture(autouse=True)
def _small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "REQUEST", REQUEST)
    monkeypatch.setattr(read, "WINDOW", WINDOW)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    descriptors = open_descriptors()
    yield
    assert open_descriptors() == descriptors
    assert readers() == []
