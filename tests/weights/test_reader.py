"""Reading tensors: every byte, once, wherever it shall go, or a sentence that says which byte is missing."""

import errno
import os
import random
from ctypes import memmove
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.errors import CheckpointError
from stoker.weights import reader as read
from stoker.weights.headers import TensorInfo
from stoker.weights.reader import read_tensor, read_tensors
from tests.support.tensor_files import (  # noqa: F401 (fixtures)
    MB,
    REQUEST,
    SIZES,
    _nothing_left_behind,
    _small_requests,
    content,
    drain,
    expected,
    readers,
    way,
    write,
)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("start", [0, 8, 1001, PAGESIZE])
def test_every_tensor_comes_once_with_the_bytes_of_the_file(tmp_path: Path, start: int) -> None:
    infos = write(tmp_path / "a.safetensors", SIZES, start) + write(tmp_path / "b.safetensors", SIZES[::-1], start)
    random.Random(0).shuffle(infos)
    seen = []
    for info, tensor in read_tensors(infos):
        assert tensor.shape == info.shape
        assert content(tensor) == expected(info)
        seen.append(info)
    assert sorted(map(id, seen)) == sorted(map(id, infos))


@pytest.mark.usefixtures("way")
def test_tensors_are_filled_in_place_wherever_they_lie(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", SIZES, 1001)
    memory = torch.zeros(sum(SIZES) + len(SIZES) * PAGESIZE, dtype=torch.uint8)
    places, at = {}, 0
    for number, info in enumerate(infos):
        if number % 2:  # where a direct read may go straight to the tensor, the others not
            at += (info.offset - memory.data_ptr() - at) % PAGESIZE
        places[info.name] = memory[at : at + info.nbytes]
        at += info.nbytes
    some = {info.name for info in infos if info.nbytes % 3}  # the rest get temporary memory
    for info, tensor in read_tensors(infos, into=lambda info: places[info.name] if info.name in some else None):
        assert (tensor.data_ptr() == places[info.name].data_ptr()) == (info.name in some) or info.nbytes == 0
        assert content(tensor) == expected(info)
    untouched = torch.ones(len(memory), dtype=torch.bool)
    for info in infos:
        if info.name in some:
            begin = places[info.name].data_ptr() - memory.data_ptr()
            untouched[begin : begin + info.nbytes] = False
    assert not memory[untouched].any()


def test_aligned_parts_go_straight_to_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (info,) = write(tmp_path / "a.safetensors", [3 * REQUEST], 1001)
    memory = torch.empty(info.nbytes + PAGESIZE, dtype=torch.uint8)
    skip = (info.offset - memory.data_ptr()) % PAGESIZE
    place = memory[skip : skip + info.nbytes]
    copied: list[int] = []

    def counted(to: int, source: int, size: int) -> None:
        copied.append(size)
        memmove(to, source, size)

    monkeypatch.setattr(read, "memmove", counted)
    ((_, tensor),) = read_tensors([info], into=lambda _: place)
    assert content(tensor) == expected(info)
    assert sum(copied) < 2 * REQUEST  # the first and the last of four requests


def test_all_dtypes_and_shapes(tmp_path: Path) -> None:
    file, infos, offset = tmp_path / "a.safetensors", [], 3  # no element lies where its type wants it
    for dtype, torch_dtype in read.DTYPES.items():
        for shape in [(), (0, 4), (5, 3), (2, 1, 7)]:
            size = torch_dtype.itemsize * torch.Size(shape).numel()
            infos.append(TensorInfo(f"{dtype}{shape}", dtype, shape, file, offset, size))
            offset += size
    file.write_bytes(random.Random(0).randbytes(offset))
    for info, tensor in [*read_tensors(infos), *((info, read_tensor(info)) for info in infos)]:
        assert (tensor.dtype, tensor.shape) == (read.DTYPES[info.dtype], info.shape)
        assert content(tensor.clone()) == expected(info)


@pytest.mark.parametrize("offset", [4, 5, 6])
def test_elements_lie_where_their_type_wants_them(tmp_path: Path, offset: int) -> None:
    path = write(tmp_path / "a.safetensors", [50_000], 0)[0].file
    info = TensorInfo("odd", "F32", (10_000,), path, offset, 40_000)
    ((_, tensor),) = read_tensors([info])
    assert tensor.data_ptr() % 4 == 0
    assert content(tensor) == expected(info)


def test_a_dtype_that_is_not_known_is_refused_before_reading(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", [8, 8])
    infos.append(TensorInfo("odd", "U64", (1,), infos[0].file, 0, 8))
    with pytest.raises(CheckpointError, match="odd is stored in U64"):
        next(read_tensors(infos))


def test_nothing_to_read_is_nothing(tmp_path: Path) -> None:
    assert drain([]) == 0
    assert drain(write(tmp_path / "a.safetensors", [0], 0)) == 1


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cut", [0, 1, PAGESIZE - 1, PAGESIZE, 2 * REQUEST, 2 * REQUEST + 700])
def test_a_file_that_ends_early_names_tensor_and_bytes(tmp_path: Path, cut: int) -> None:
    infos = write(tmp_path / "a.safetensors", [100, 5 * REQUEST], 1000)
    os.truncate(infos[0].file, 1100 + cut)  # after its header was read
    with pytest.raises(CheckpointError) as caught:
        drain(infos)
    message = str(caught.value)
    assert message == (f"{infos[0].file} ended while reading a.1: {cut:,} of {5 * REQUEST:,} bytes; fetch it again.")


def test_a_file_that_vanished_or_is_closed_to_us(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", [100]) + write(tmp_path / "b.safetensors", [64])
    infos[1].file.unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors cannot .* b\.0: 0 of 64 bytes, No such file"):
        drain(infos)


def test_permission_denied_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = write(tmp_path / "a.safetensors", [100])

    def refuse(*_: Any) -> int:  # a mode of 0 would not stop root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot .* a\.0: 0 of 100 bytes, Permission denied"):
        drain(infos)


def test_a_failing_disk_surfaces_in_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = write(tmp_path / "a.safetensors", [2 * REQUEST] * 8)
    really_read = os.preadv

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        if offset > 9 * REQUEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=rf"reading a\.\d: [\d,]+ of {2 * REQUEST:,} bytes, then Input/output"):
        drain(infos)
    assert readers() == []


@pytest.mark.parametrize(
    "place",
    [torch.empty(99, dtype=torch.uint8), torch.empty(100, dtype=torch.int8), torch.empty(200, dtype=torch.uint8)[::2]],
)
def test_a_wrong_destination_is_refused(tmp_path: Path, place: Tensor) -> None:
    with pytest.raises(ValueError, match=r"a\.0 needs a contiguous torch.uint8 of shape \[100\]"):
        drain(write(tmp_path / "a.safetensors", [100]), into=lambda _: place)


def test_tensors_that_are_kept_keep_their_bytes(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", [MB, 3000] * 32)
    kept = list(read_tensors(infos))
    assert all(content(tensor) == expected(info) for info, tensor in kept)


def test_overlapping_tensors_are_each_complete(tmp_path: Path) -> None:
    """No writer makes them, but a header can say so, and a tensor that silently never comes would be worse."""
    path = write(tmp_path / "a.safetensors", [4 * REQUEST], 0)[0].file
    places = [(0, 3 * REQUEST), (0, 0), (0, 100_000), (8, 10), (50_000, 40), (REQUEST, REQUEST)]
    infos = [TensorInfo(str(place), "U8", (place[1],), path, *place) for place in places]
    tensors = {info.name: content(tensor) for info, tensor in read_tensors(infos)}
    assert tensors == {info.name: expected(info) for info in infos}


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", SIZES, 1001, gaps=[n % 3 * 50_000 for n in range(len(SIZES))])
    calls: list[tuple[int, int]] = []
    drain(infos, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (sum(SIZES), sum(SIZES))
