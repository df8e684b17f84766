"""A network namespace of our own, in which nothing but this machine can be reached."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


@contextmanager
def loopback_only() -> Iterator[bool]:
    """Until it is left, this thread and the processes it starts have a loopback interface and no other.

    False where the system does not allow that (it takes root on Linux); then nothing is changed.
    """
    try:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    except OSError:
        yield False
        return
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare and os.setns came with Python 3.12
    try:
        if libc.unshare(CLONE_NEWNET):
            yield False
            return
        try:
            _bring_up("lo")
            yield True
        finally:
            if libc.setns(before, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "the network namespace cannot be left")
    finally:
        os.close(before)


def _bring_up(interface: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        fcntl.ioctl(anything, SIOCSIFFLAGS, struct.pack("16sH14x", interface.encode(), IFF_UP))
