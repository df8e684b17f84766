"""How much memory there really is, and what is done when it runs short.

On unified memory and on CPUs what counts is what the system could still give without swapping (MemAvailable), or what
is left of a control group's limit, whichever is less; a driver's own figure knows neither. A card with memory of its
own is judged by that memory, for weights and caches are there; its host only by what processes and loading need.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.sizes.memory import size

log = logging.getLogger("stoker.server")

RESERVE_SHARE, LEAST_RESERVE = 0.08, 256 << 20  # of the machine's memory, to stay free
CARD_HOST_RESERVE = 2 << 30  # at most, of a host beside a card with memory of its own
LOW, CRITICAL = 0.5, 0.25  # of the reserve: below the first something is given up, below the second the server ends
READ_S = 1.0
PROC = "STOKER_PROC"  # environment: a folder with a meminfo to read in place of /proc, for tests
GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 of control groups writes a number like this for no limit


@dataclass(frozen=True)
class Reading:
    """Bytes."""

    available: int
    total: int
    host: "Reading | None" = None  # beside a card whose own memory this is

    @property
    def reserve(self) -> int:
        """What should stay free if nobody says otherwise."""
        return max(LEAST_RESERVE, int(self.total * RESERVE_SHARE))

    @property
    def host_reserve(self) -> int:
        """What should stay free of the host's memory. Beside a card no model lies there: less will do."""
        return self.reserve if self.host is None else min(self.host.reserve, CARD_HOST_RESERVE)


def read_memory(device: str = "cpu") -> Reading:
    """Of an accelerator with memory of its own; else of the host, or its control group if that has less."""
    if device.startswith("cuda") and (own := _device(device)):
        return Reading(*own, host=read_memory())
    found = _host()
    if not os.environ.get(PROC):
        limits = [Reading(limit - used, limit) for limit, used in _group_limits()]
        found = min([found, *limits], key=lambda reading: reading.available)
    return found


def _host() -> Reading:
    import psutil

    psutil.PROCFS_PATH = os.environ.get(PROC) or "/proc"
    try:
        memory = psutil.virtual_memory()
    finally:
        psutil.PROCFS_PATH = "/proc"
    return Reading(memory.available, memory.total)


def _group_limits() -> list[tuple[int, int]]:
    """Limit and use of every control group that this process is in, of either version. Page cache counts as free."""
    found = []
    for folder in _group_folders():
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit and used and limit < UNLIMITED:
            found.append((limit, max(0, used - _page_cache(folder))))
    return found


def _group_folders() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = GROUPS if not controllers else GROUPS / "memory"
            own = root / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return list(dict.fromkeys(folders))


def _page_cache(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _device(device: str) -> tuple[int, int] | None:
    """Available and all memory of an accelerator; None where it shares the host's."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    if getattr(properties, "is_integrated", False):
        return None
    available, total = torch.cuda.mem_get_info(device)
    return available, total


class MemoryGuard:
    """Gives up the prefix cache, then turns waiting requests away, then ends the server: one of them per reading, and
    only as long as memory stays short, so that the host never has to swap."""

    def __init__(
        self,
        read: Callable[[], Reading],
        reserve: int,
        evict_cache: Callable[[], object],
        turn_away: Callable[[str], object],
        end: Callable[[str], object],
    ) -> None:
        self._read, self.reserve = read, reserve
        self._evict_cache, self._turn_away, self._end = evict_cache, turn_away, end
        self._level = 0
        self.latest: Reading | None = None

    @property
    def short(self) -> bool:
        """Whether new requests are turned away too."""
        return self._level >= 2

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(READ_S)

    def look(self) -> None:
        """One reading, and what follows from it."""
        self.latest = reading = self._read()
        if reading.available >= self.reserve * LOW:
            self._level = 0
            return
        numbers = f"{size(reading.available)} of memory are left and {size(self.reserve)} should be"
        if self._level == 0:
            self._level = 1
            log.warning("%s: the prefix cache is given up", numbers)
            self._evict_cache()
        elif self._level == 1:
            self._level = 2
            log.warning("%s: waiting requests are turned away", numbers)
            self._turn_away(f"{numbers}: requests that wait are turned away. Try again later.")
        elif reading.available < self.reserve * CRITICAL and self._level == 2:
            self._level = 3
            log.error("%s: the server ends before the host swaps", numbers)
            self._end(
                f"{numbers}, and giving up the prefix cache and waiting requests was not enough. The server ended "
                "before the host had to swap; start it with a smaller --context or --users."
            )
