# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Compiled kernels on several threads: the ones torch has, since two pools would take each other's cores.

A kernel is a number of items that do not touch each other's results. Every thread of the team enters the same function
and takes tickets until none is left. Which thread computes an item is chance; what the item computes is not.
"""

import ctypes
import os
from array import array
from functools import lru_cache

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from stoker.backends.cpu.kernels.compiled import compiled, longs

COUNTERS = 3  # of one call: tickets taken of the first part, items of it that are done, tickets of the second part

# A function of an address, where `call` has put counters and arguments.
entry = numba.cfunc(types.void(types.intp), cache=True, nopython=True, error_model="numpy")


def call(kernel, *arguments: int) -> None:
    """Enters `kernel` with as many threads as torch uses, and returns when all have left it."""
    data = array("q", (0,) * COUNTERS + arguments)
    threads, parallel = torch.get_num_threads(), _parallel()
    if threads > 1 and parallel is not None:
        parallel(kernel.address, data.buffer_info()[0], threads, 0)
    else:
        kernel.ctypes(data.buffer_info()[0])


@lru_cache
def _parallel():
    """The OpenMP runtime's own way to start a team, in the very library that torch has loaded; None without one."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libgomp" in line}
        function = ctypes.CDLL(min(paths), mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


@intrinsic
def _add_at(typing_context, address, amount):
    """Adds to the int64 at an address, atomically; what it was before."""
    signature = types.int64(types.intp, types.int64)

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return signature, generate


@compiled
def ticket(data):
    """The number of the next item, of the first part."""
    return _add_at(data, 1)


@compiled
def finish(data):
    """An item of the first part is done."""
    _add_at(data + 8, 1)


@compiled
def wait(data, items):
    """Until every item of the first part is done, by whoever took it."""
    while _add_at(data + 8, 0) < items:
        pass


@compiled
def second_ticket(data):
    return _add_at(data + 16, 1)


@compiled
def arguments(data, count):
    return longs(data + 8 * COUNTERS, (count,))


@lru_cache
def float_bits(x: float) -> int:
    """A float as an argument; `float_of` is the way back."""
    return int(np.float32(x).view(np.int32))


@compiled
def float_of(bits):
    return np.int32(bits).view(np.float32)
