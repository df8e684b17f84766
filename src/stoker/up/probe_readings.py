"""What `stoker probe` finds out about a box, as plain data for --json and for receipts. No host names, no serials."""

from typing import Literal

from msgspec import Struct


def shown(rate: float) -> str:
    """A rate in GB/s, with as many digits as it is worth."""
    return f"{rate:.0f}" if rate >= 20 else f"{rate:.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


class Processor(Struct, frozen=True):
    name: str
    architecture: str  # x86_64, aarch64
    cores: int
    threads: int
    busy_percent: float  # before anything was measured
    clock_mhz: float | None = None
    highest_clock_mhz: float | None = None


class Memory(Struct, frozen=True):
    """Bytes of the host's memory."""

    total: int
    available: int
    locked: int  # cannot be swapped out or moved
    swap_total: int
    swap_used: int
    unified: bool  # an accelerator shares it


class Card(Struct, frozen=True):
    """An NVIDIA card as NVML tells it, before the measurement and while weights were read. None: not measured."""

    name: str
    total: int | None  # bytes; None where it shares the host's memory
    free: int | None
    busy_percent: int | None
    limit_watts: float | None
    default_limit_watts: float | None
    highest_clock_mhz: int | None
    memory_clock_mhz: int | None
    watts: float | None  # the highest seen while weights were read
    clock_mhz: int | None  # likewise
    temperature_c: int | None  # likewise
    held_back_by: tuple[str, ...] = ()  # reasons seen then


class Speed(Struct, frozen=True):
    """Of one device, measured here."""

    device: str  # cpu, cuda:0, ...
    name: str
    architecture: str  # sm_121, gfx1151; empty for a CPU
    copy_gb_s: float  # read and written bytes counted
    gemv_gb_s: float  # weights read by a product with one vector
    matrix_bytes: int
    library: str  # torch or numpy
    total_bytes: int | None = None
    unified: bool = False


class Disk(Struct, frozen=True):
    """Measured here, past the page cache where `direct`."""

    file: str  # what was read
    read_gb_s: float
    bytes: int
    direct: bool


class Published(Struct, frozen=True):
    """What the planner knows of such a box. Nothing of it was measured here."""

    box: str
    name: str
    bandwidth_gb_s: float  # on paper
    achievable_gb_s: float  # what others measured of large reads
    memory_gib: float  # of all devices, as their owners see it
    devices: int
    unified: bool
    source: str


class Finding(Struct, frozen=True):
    kind: Literal["warning", "note"]
    text: str


class BoxProbe(Struct, frozen=True):
    version: str  # of Stoker
    date: str
    seconds: float  # that it took
    processor: Processor
    memory: Memory
    cards: tuple[Card, ...]
    speeds: tuple[Speed, ...]
    disk: Disk | None
    published: Published | None  # None: the planner knows no such box
    findings: tuple[Finding, ...] = ()
    problems: tuple[str, ...] = ()  # what could not be measured, and why
