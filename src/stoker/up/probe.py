"""What this box is and how fast it is now, for `stoker probe`, for `stoker up` and its receipts.

The speed of memory is measured by `bandwidth.py` in a process of the engine's Python, so that this works without torch.
Meanwhile the card's power, clocks and temperature are read.
"""

import json
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

import stoker
from stoker.bench.environment import processor
from stoker.cards import Card as Handle
from stoker.cards import CardReading, nvidia_cards
from stoker.plan.catalog import find_box
from stoker.plan.machine import UNIFIED
from stoker.up import bandwidth
from stoker.up.disk_speed import read_speed
from stoker.up.probe_compare import findings, published
from stoker.up.probe_readings import BoxProbe, Card, Memory, Processor, Speed

LIMIT_S = 120.0  # for the process, imports included
SAMPLE_S = 0.1
DOING = {"copy": "copying memory", "gemv": "reading weights"}
SHARE = 16  # a matrix takes at most this part of the memory that is available


def probe_box(
    box: str | None = None,
    model: Path | None = None,
    python: str = sys.executable,
    told: Callable[[str], None] = lambda what: None,
) -> BoxProbe:
    """Takes a few seconds. `box` is the planner's name of this box, if it cannot tell; from `model` a file is read to
    measure the disk; `python` is the engine's; `told` hears what is being measured."""
    started, problems = time.monotonic(), list[str]()
    if box:
        find_box(box)  # a wrong name is said before anything is measured
    told("cards and memory")
    handles = nvidia_cards()
    before = [handle.read() for handle in handles]
    found_processor = _processor()
    speeds, during = _measure(python, handles, told, problems)
    told("the disk")
    disk = None
    try:
        disk = read_speed(model)
    except OSError as error:
        problems.append(f"the speed of the disk is not known: {error.strerror or error}")
    names = [handle.name for handle in handles]
    names += [name for speed in speeds for name in (speed.name, speed.architecture)]
    probe = BoxProbe(
        version=stoker.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        processor=found_processor,
        memory=_memory(names, speeds),
        cards=tuple(_card(*each) for each in zip(handles, before, during, strict=True)),
        speeds=tuple(speeds),
        disk=disk,
        published=published(box, names, max(1, len(handles), len(speeds))),
        problems=tuple(problems),
    )
    seconds = round(time.monotonic() - started, 1)
    return msgspec.structs.replace(probe, seconds=seconds, findings=tuple(findings(probe)))


def _processor() -> Processor:
    clock = None
    with suppress(Exception):  # psutil has no clocks on some machines, and says so in several ways
        clock = psutil.cpu_freq()
    return Processor(
        name=processor(),
        architecture=platform.machine(),
        cores=psutil.cpu_count(logical=False) or 0,
        threads=psutil.cpu_count() or 0,
        busy_percent=psutil.cpu_percent(interval=0.3),
        clock_mhz=clock.current if clock else None,
        highest_clock_mhz=clock.max or None if clock else None,
    )


def _memory(names: Iterable[str], speeds: Sequence[Speed]) -> Memory:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    named = any(word in name.lower() for name in names for word in UNIFIED)
    return Memory(
        total=memory.total,
        available=memory.available,
        locked=_locked(),
        swap_total=swap.total,
        swap_used=swap.used,
        unified=named or any(speed.unified for speed in speeds),
    )


def _locked() -> int:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("Mlocked:"):
                return int(line.split()[1]) << 10
    return 0


def _card(handle: Handle, before: CardReading, during: CardReading) -> Card:
    return Card(
        name=handle.name,
        total=handle.total or None,
        free=handle.free if handle.total else None,
        busy_percent=before.busy_percent,
        limit_watts=before.limit_watts,
        default_limit_watts=before.default_limit_watts,
        highest_clock_mhz=before.highest_clock_mhz,
        memory_clock_mhz=during.memory_clock_mhz,
        watts=during.watts,
        clock_mhz=during.clock_mhz,
        temperature_c=during.temperature_c,
        held_back_by=during.held_back_by,
    )


def _measure(
    python: str, handles: Sequence[Handle], told: Callable[[str], None], problems: list[str]
) -> tuple[list[Speed], list[CardReading]]:
    """Speeds, and each card while weights were read."""
    most = psutil.virtual_memory().available // SHARE
    seen: list[list[CardReading]] = [[] for _ in handles]
    reads, found = False, None  # reads: a card does, now
    told("starting a process that measures memory")
    with tempfile.TemporaryFile() as errors:
        for line in _lines([python, "-c", Path(bandwidth.__file__).read_text(encoding="utf-8"), str(most)], errors):
            if line.startswith(b"{"):  # and not what some module prints when it is imported
                message = json.loads(line)
                found, phase, device = message.get("result", found), message.get("phase"), message.get("device", "cpu")
                reads = phase == "gemv" and device != "cpu"
                if phase in DOING:
                    told(f"{DOING[phase]} on {device}")
            elif reads and not line:
                for handle, readings in zip(handles, seen, strict=True):
                    readings.append(handle.read())
        if found is None:
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
            problems.append(f"the speed of memory is not known: {said[-1] if said else f'{python} ended silently'}")
    speeds = [_speed(device, found["library"]) for device in found["devices"]] if found else []
    if handles and found and all(speed.device == "cpu" for speed in speeds):
        why = "has no torch" if found["library"] == "numpy" else "has a torch that finds no card"
        problems.append(f"only the processor's memory was measured, since {python} {why}")
    return speeds, [
        _highest(readings) if readings else _idle(handle.read()) for handle, readings in zip(handles, seen, strict=True)
    ]


def _lines(command: Sequence[str], errors: IO[bytes]) -> Iterator[bytes]:
    """Of the process's output as they come; an empty one every SAMPLE_S seconds in between. Ends with the process."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, cwd="/")
    except OSError as error:
        errors.write(f"{command[0]} cannot be run: {error.strerror}".encode())
        return

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    until = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < until:
            try:
                line = lines.get(timeout=SAMPLE_S)
            except queue.Empty:
                yield b""
                continue
            if line is None:
                return
            yield line
        errors.write(f"it took longer than {LIMIT_S:.0f} s".encode())
    finally:
        process.kill()
        process.wait()


def _speed(device: dict[str, Any], library: str) -> Speed:
    return msgspec.convert({"name": "", "architecture": "", **device, "library": library}, Speed)


def _idle(reading: CardReading) -> CardReading:
    """Of a card that nothing was read on: its power and clocks say nothing."""
    return replace(reading, watts=None, clock_mhz=None, memory_clock_mhz=None, held_back_by=())


def _highest(readings: Sequence[CardReading]) -> CardReading:
    def most(field: str) -> Any:
        return max((value for each in readings if (value := getattr(each, field)) is not None), default=None)

    return replace(
        readings[-1],
        watts=most("watts"),
        clock_mhz=most("clock_mhz"),
        memory_clock_mhz=most("memory_clock_mhz"),
        temperature_c=most("temperature_c"),
        held_back_by=tuple(dict.fromkeys(reason for each in readings for reason in each.held_back_by)),
    )
