"""Reads that bypass the page cache: files opened with O_DIRECT, and the aligned memory that needs. No torch.

Weights are read once. Cached, they would push out everything else, and on a machine whose GPU shares the memory they
would take it twice. Where a filesystem has no direct reads, the cached pages are dropped as soon as they are copied.
"""

import errno
import fcntl
import mmap
import os
import threading
import weakref
from ctypes import Array, addressof, c_char
from pathlib import Path

# Offsets, lengths and addresses of direct reads are multiples of the device's block, 512 or 4,096 bytes. A page
# satisfies both, and is also the unit in which cached pages are dropped.
ALIGN = mmap.PAGESIZE


def align_down(offset: int) -> int:
    return offset - offset % ALIGN


def align_up(offset: int) -> int:
    return align_down(offset + ALIGN - 1)


class DirectFile:
    """One open file; several threads may `read` it at once."""

    def __init__(self, path: Path) -> None:
        self.direct = hasattr(os, "O_DIRECT")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self._descriptor = os.open(path, os.O_RDONLY)
            self._go_buffered()

    def _go_buffered(self) -> None:
        self.direct = False
        # No read-ahead: it would cache pages of up to 2 MB that reach beyond a request and are not dropped with it.
        self._advise("POSIX_FADV_RANDOM", 0, 0)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, address: int, start: int, stop: int) -> int:
        """Read bytes `start` to `stop` into memory; fewer only at the end of the file. All are multiples of ALIGN."""
        memory = memoryview((c_char * (stop - start)).from_address(address))
        reached = begin = 0
        while reached < stop - start:
            reached = begin + self._read_once(memory[begin:], start + begin)
            # A short read means end of file or an interruption; reading again from the last boundary tells which.
            again = align_down(reached) if self.direct else reached
            if again == begin:
                break
            begin = again
        if not self.direct:
            self._advise("POSIX_FADV_DONTNEED", start, stop - start)
        return reached

    def _read_once(self, memory: memoryview, start: int) -> int:
        direct = self.direct  # another thread may fall back while this one reads
        try:
            return os.preadv(self._descriptor, [memory], start)
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
        # Some network and overlay filesystems accept the flag when opening and refuse it when reading.
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._go_buffered()
        return os.preadv(self._descriptor, [memory], start)

    def _advise(self, advice: str, start: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, length, getattr(os, advice))

    def close(self) -> None:
        if not self.direct:
            self._advise("POSIX_FADV_DONTNEED", 0, 0)  # the whole file, since two requests may have shared a page
        os.close(self._descriptor)


class Block:
    """Aligned memory as a buffer object; its pages return to the pool with the last reference to `buffer`."""

    def __init__(self, buffer: "Array[c_char]") -> None:
        self.buffer = buffer
        self.address = addressof(buffer)


class Pool:
    """Aligned memory that is reused, because the first touch of a new page costs more than reading into it.

    Filling fresh memory took 0.5 s of processor time per GB where the same memory again took 0.06 s and the disk
    0.2 s. `limit` bounds what the pool holds beyond the blocks in use.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0  # of all pages, in use and free
        self._free: list[mmap.mmap] = []
        self._lock = threading.RLock()  # garbage collection inside `take` may free a block in the same thread

    def take(self, size: int) -> Block:
        with self._lock:
            pages = self._reuse(size)
            if pages is None:
                while self._free and self._size + size > self._limit:
                    self._size -= len(self._free.pop(0))
                pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._size += size
        buffer = (c_char * size).from_buffer(pages)
        weakref.finalize(buffer, self._give_back, pages).atexit = False
        return Block(buffer)

    def _reuse(self, size: int) -> mmap.mmap | None:
        """The block freed last (most likely still in the processor's cache) that fits without wasting half of it."""
        for i in range(len(self._free) - 1, -1, -1):
            if size <= len(self._free[i]) <= 2 * size:
                return self._free.pop(i)
        return None

    def _give_back(self, pages: mmap.mmap) -> None:
        with self._lock:
            if self._size <= self._limit:
                self._free.append(pages)
            else:
                self._size -= len(pages)

    def close(self) -> None:
        """Free unused memory now, and the rest as soon as it is no longer referenced."""
        with self._lock:
            self._limit = -1
            self._free.clear()
