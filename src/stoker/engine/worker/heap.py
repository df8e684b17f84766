"""Memory of a process that runs for long: what the C library (glibc) keeps of freed memory is bounded and given back
while the process rests, and the garbage collector leaves alone what was loaded at the start."""

import ctypes
import gc
from contextlib import suppress

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3
ARENAS = 2  # glibc would give each of many threads one of its own, and each keeps what it took at its busiest
LARGE = 1 << 20  # bytes of a block that is taken from the system for itself, where that is asked for


def limit_arenas() -> None:
    """To be called before a process starts threads."""
    with suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def give_back_large_blocks() -> None:
    """As soon as they are freed. Left alone, glibc learns from the first ones to keep blocks of up to 32 MiB. It costs
    page faults, so it is not for those who take the same large blocks again and again."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE)


def trim() -> None:
    """Takes milliseconds, during which other threads may run."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_loaded() -> None:
    """All objects there are stay. A look at the 250,000 that imports leave takes 0.15 s, and everything waits."""
    gc.collect()
    gc.freeze()
