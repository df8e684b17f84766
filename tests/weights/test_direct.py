"""What reading leaves behind: no cached pages, no more memory than promised, no threads and no open files."""

import gc
import os
import threading
import time
from ctypes import CDLL, c_int, c_size_t, c_ubyte, c_void_p, get_errno, memset
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch

from stoker.weights.direct import DirectFile, Pool
from stoker.weights.headers import TensorInfo
from stoker.weights.reader import THREADS, read_tensors
from tests.support.tensor_files import (  # noqa: F401 (fixtures)
    MB,
    REQUEST,
    SIZES,
    WINDOW,
    _nothing_left_behind,
    _small_requests,
    content,
    drain,
    expected,
    open_descriptors,
    readers,
    way,
    write,
)


@pytest.mark.skipif(not Path("/proc/filesystems").exists(), reason="needs /proc")
def test_a_filesystem_that_really_has_no_direct_reads() -> None:
    """procfs refuses O_DIRECT and answers in short pieces."""
    path = Path("/proc/filesystems")
    size = len(path.read_bytes())
    infos = [TensorInfo("a", "U8", (10,), path, 0, 10), TensorInfo("b", "U8", (size - 10,), path, 10, size - 10)]
    file = DirectFile(path)
    assert not file.direct
    file.close()
    assert b"".join(content(tensor) for _, tensor in sorted(read_tensors(infos), key=lambda x: x[0].name)) == (
        path.read_bytes()
    )


def test_direct_reads_are_used_where_they_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = write(tmp_path / "a.safetensors", SIZES, 1001)
    try:
        os.close(os.open(infos[0].file, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this filesystem has no direct reads")
    used: list[bool] = []
    close = DirectFile.close

    def closing(self: DirectFile) -> None:
        used.append(self.direct)
        close(self)

    monkeypatch.setattr(DirectFile, "close", closing)
    drain(infos)
    assert used == [True]


def test_a_filesystem_in_memory() -> None:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("needs /dev/shm")
    path = folder / f"stoker-test-{os.getpid()}.safetensors"
    try:
        for info, tensor in read_tensors(write(path, SIZES)):
            assert content(tensor) == expected(info)
    finally:
        path.unlink()


def cached_pages(path: Path) -> int:
    """Resident pages of the file in the page cache, asked of the kernel with mincore."""
    libc = CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = c_void_p, [c_void_p, c_size_t, c_int, c_int, c_int, c_size_t]
    libc.mincore.argtypes, libc.munmap.argtypes = [c_void_p, c_size_t, c_void_p], [c_void_p, c_size_t]
    size = path.stat().st_size
    pages = (size + PAGESIZE - 1) // PAGESIZE
    resident = (c_ubyte * pages)()
    with path.open("rb") as file:
        address = libc.mmap(None, size, 1, 1, file.fileno(), 0)
        assert libc.mincore(address, size, resident) == 0, os.strerror(get_errno())
        libc.munmap(address, size)
    return sum(page & 1 for page in resident)


@pytest.mark.usefixtures("way")
def test_reading_does_not_fill_the_page_cache(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", [8 * MB, 300, 5 * MB, MB, MB, 32 * MB], 1001)
    path = infos[0].file
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    before = cached_pages(path)
    if before > 64:
        os.close(descriptor)
        pytest.skip("this filesystem keeps its pages")  # tmpfs: they are the file
    for _ in read_tensors(infos):
        cached = cached_pages(path)  # not only at the end: the whole file may be larger than the memory
    assert cached <= before + 2 * MB // PAGESIZE
    assert cached_pages(path) <= before + 16
    os.preadv(descriptor, [bytearray(8 * MB)], 0)  # the question itself is able to see cached pages
    assert cached_pages(path) >= 8 * MB // PAGESIZE
    os.close(descriptor)


def test_closing_early_stops_the_threads(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", [MB] * 64)
    tensors = read_tensors(infos)
    info, kept = next(tensors)
    assert len(readers()) == THREADS
    tensors.close()  # type: ignore[attr-defined]
    assert readers() == []
    gc.collect()
    assert content(kept) == expected(info)  # what was handed over stays valid


def test_an_exception_in_the_caller_stops_the_threads(tmp_path: Path) -> None:
    infos = write(tmp_path / "a.safetensors", [MB] * 64)
    descriptors = open_descriptors()

    def stumble() -> None:
        for _ in read_tensors(infos):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        stumble()
    assert caught.tb is not None  # it keeps the frames, and the threads stop all the same
    assert readers() == []
    assert open_descriptors() == descriptors


def test_an_exception_in_into_stops_the_threads(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        drain(write(tmp_path / "a.safetensors", [100]), into=lambda info: {}[info.name])


def test_a_slow_caller_holds_the_readers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = write(tmp_path / "a.safetensors", [MB] * 128 + [16 * MB])  # how far ahead does not depend on the largest
    asked: list[int] = []

    def instant(self: DirectFile, address: int, start: int, stop: int) -> int:
        asked.append(stop - start)
        return stop - start

    monkeypatch.setattr(DirectFile, "read", instant)
    for taken, _ in enumerate(read_tensors(infos), 1):
        if taken in (1, 40):
            time.sleep(0.1)  # time enough to read everything
            assert sum(asked) <= taken * MB + 2 * MB + WINDOW + REQUEST
    assert sum(asked) >= 144 * MB


def resident() -> int:
    """Bytes of anonymous memory in use by this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_memory_stays_within_twice_the_largest_and_the_fixed_buffers(tmp_path: Path) -> None:
    largest = 24 * MB
    infos = write(tmp_path / "a.safetensors", [largest] * 3 + [MB, 1000, PAGESIZE] * 40 + [largest] * 3, 1001)
    drain(infos[:1])
    before, samples, stop = resident(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            samples.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _, _tensor in read_tensors(infos):
        time.sleep(0.05 if len(_tensor) == largest else 0)  # so that the readers run as far ahead as they may
    stop.set()
    watcher.join()
    del _tensor
    assert max(samples) - before <= 2 * largest + WINDOW + THREADS * REQUEST + 4 * MB
    assert resident() - before <= 4 * MB


def test_memory_beyond_the_limit_is_freed_at_once() -> None:
    pool = Pool(MB)
    before = resident()
    blocks = [pool.take(8 * MB) for _ in range(3)]
    for block in blocks:
        memset(block.address, 1, 8 * MB)
    del block
    assert resident() - before >= 24 * MB
    blocks.clear()
    assert resident() - before <= 9 * MB


def test_memory_is_used_again_only_when_nobody_has_it() -> None:
    pool = Pool(8 * MB)
    block = pool.take(MB)
    address, view = block.address, torch.frombuffer(block.buffer, dtype=torch.uint8)[5:10]
    del block
    assert pool.take(MB).address != address
    del view
    first, second = pool.take(MB), pool.take(MB)
    assert address in (first.address, second.address)
