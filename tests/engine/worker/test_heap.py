"""Memory that was freed goes back to the system, and what stays is not looked at again and again."""

import platform
import subprocess
import sys

import pytest

GROW = """
from stoker.engine.worker import heap
def held():  # MB
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
heap.limit_arenas()
pieces = [bytes(2000) for _ in range(100_000)]
last = pieces[-1]  # keeps the heap's end in use, so that the C library gives nothing back by itself
before = held()
del pieces
freed = held()
heap.trim()
print(before, freed, held())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_freed_memory_goes_back_when_it_is_asked_for() -> None:
    ran = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True)
    before, freed, trimmed = map(int, ran.stdout.split())
    assert freed > before - 50
    assert trimmed < before - 150


LOAD = """
import gc, time
from stoker.engine.worker import heap
loaded = [[number] for number in range(1_000_000)]
def longest():  # ms that a collection of everything takes
    began = time.perf_counter()
    gc.collect()
    return 1000 * (time.perf_counter() - began)
before = longest()
heap.freeze_loaded()
print(before, longest())
"""


def test_what_is_loaded_costs_no_collection_time() -> None:
    ran = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True)
    before, after = map(float, ran.stdout.split())
    assert after < before / 5
