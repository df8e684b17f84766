# Numba types the kernels; Python's annotations cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the compiled CPU kernels share: how they get at a tensor's memory, bf16, and exp.

A step of a small model is hundreds of tiny tensor operations, and calling them costs more than computing them. Numba
compiles whole stretches of it for this machine's processor, once: what it made is kept in the user's cache, under a
name that changes with these sources.

A row has the same bits wherever it stands. Arithmetic is done as written, in vectors or not. Only `dot` and `total` may
add in an order of the compiler's choice: each is one piece of code, and a row's length never changes. exp is spelled
out, since a library's vector and scalar versions round differently.
"""

import atexit
import logging
import os
import pickle
import stat
import tempfile
from hashlib import sha256
from pathlib import Path
from shutil import rmtree

import numba
import numpy as np
from numba import carray, types
from numba.extending import intrinsic

log = logging.getLogger("stoker.cpu")
KEPT = 4  # versions whose compiled kernels stay in the cache


def _cache() -> Path:
    """Numba itself notices a change only in the file a function is in, not in those it calls."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser() / "stoker" / f"kernels-{sha256(sources).hexdigest()[:16]}"
        if not folder.exists():
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            others = sorted(folder.parent.glob("kernels-*"), key=lambda other: other.stat().st_mtime)
            for other in others[:-KEPT]:
                rmtree(other, ignore_errors=True)
        others_write = next((each for each in (folder.parent, folder) if not _only_ours(each)), None)
        if others_write:
            log.warning("compiled kernels are not kept: %s can be written by other users", others_write)
        else:
            folder.chmod(0o700)
            remove_cut_off(folder)
        usable = others_write is None and os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # RuntimeError: nobody's home
        usable = False
    if usable:
        return folder
    own = Path(tempfile.mkdtemp(prefix="stoker-kernels-"))
    atexit.register(rmtree, own, ignore_errors=True)
    return own


def _only_ours(folder: Path) -> bool:
    """What lies in the cache is executed, so nobody else may be able to put it there."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def remove_cut_off(folder: Path) -> None:
    """Drops what a full disk or a power cut left of files in the cache: each is a pickle, and those end with a dot."""
    for path in folder.rglob("*.nb[ic]"):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            whole = file.read() == pickle.STOP
        if not whole:
            path.unlink()


numba.config.CACHE_DIR = str(_cache())

# Division like numpy's: a check for zero would keep loops from using vectors.
compiled = numba.njit(cache=True, nogil=True, error_model="numpy")
compared = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"nnan", "nsz"})  # maxima have no order
summed = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})

LOG2E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST, HIGHEST = np.float32(-87.3), np.float32(88.3)  # exp between the smallest normal number and the largest
ONE, HALF = np.float32(1), np.float32(0.5)
P0, P1, P2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P3, P4, P5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


def _pointer_to(element):
    """An address as a pointer to elements of this type."""

    @intrinsic
    def pointer(typing_context, address):
        signature = types.CPointer(element)(types.intp)

        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return signature, generate

    return pointer


_floats, _halves, _longs, _bytes = (_pointer_to(t) for t in (types.float32, types.uint16, types.int64, types.uint8))


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c, rounded once."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@compiled
def floats(address, shape):
    return carray(_floats(address), shape)


@compiled
def bf16s(address, shape):
    """bf16 numbers by their bits."""
    return carray(_halves(address), shape)


@compiled
def longs(address, shape):
    return carray(_longs(address), shape)


@compiled
def octets(address, shape):
    return carray(_bytes(address), shape)


@compiled
def widen(bits):
    """bf16 bits -> fp32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def narrow(x):
    """fp32 -> bf16 bits, to nearest, ties to even."""
    bits = np.float32(x).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@compiled
def exp(x):
    """e^x within 2 units in the last place, flat beyond the normal numbers."""
    x = min(max(np.float32(x), LOWEST), HIGHEST)
    whole = np.floor(x * LOG2E + HALF)
    x = (x - whole * LN2_HIGH) - whole * LN2_LOW
    y = ((((P0 * x + P1) * x + P2) * x + P3) * x + P4) * x + P5
    y = (y * (x * x) + x) + ONE
    return y * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def sigmoid(x):
    return ONE / (ONE + exp(-x))


@compiled
def silu(x):
    return x / (ONE + exp(-x))


@summed
def dot(a, b):
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@summed
def total(row):
    found = np.float32(0)
    for i in range(row.shape[0]):
        found += row[i]
    return found


@compared
def highest(row):
    found = row[0]
    for i in range(row.shape[0]):
        found = max(found, row[i])
    return found
