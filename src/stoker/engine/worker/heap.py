"""Memory of long-running processes: limits what glibc retains of freed memory, returns it to the system while the
process is idle, and excludes from garbage collection what was loaded at the start."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
ARENAS = 2  # glibc would create one per thread, and each retains its peak
LARGE = 1 << 20  # bytes from which a block is mapped by itself, with `unmap_large_blocks`


def limit_arenas() -> None:
    """Limits malloc arenas. Call it before the process starts threads."""
    with suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def unmap_large_blocks() -> None:
    """Returns large blocks to the system as soon as they are freed. By default glibc raises its threshold to up to
    32 MiB. This costs page faults, so it is wrong for a process that allocates the same large blocks repeatedly."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Returns freed memory to the system. Takes milliseconds and releases the GIL."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def freeze_loaded() -> None:
    """Excludes all current objects from garbage collection: 250,000 of them, left by imports, would cost 0.15 s each
    time, during which everything waits."""
    gc.collect()
    gc.freeze()


@contextmanager
def collection_paused() -> Iterator[None]:
    """For reading what is large and stays: looking for garbage among the headers of 113,000 tensors, again and again
    while they are read, took as long as reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
