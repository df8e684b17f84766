"""What a start goes through, as whoever waits for it is told."""

from typing import Protocol

READING = "reading weights"
PACKING = "packing weights"
DRAFTER = "loading the drafter"
CACHES = "allocating caches"
COMPILING = "compiling kernels"
RECORDING = "recording graphs"
UNITS = {READING: "bytes", COMPILING: "kernels", RECORDING: "graphs"}


class Report(Protocol):
    """Called with a phase as it begins, and as it goes on with how much of it is done; `total` 0: not known."""

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None: ...


def silent(phase: str, done: int = 0, total: int = 0) -> None:
    """For those whom nobody waits for."""
