"""The machine this runs on, as a box: memory from /proc/meminfo and nvidia-smi, bandwidth from known devices.

What cannot be found out is assumed low and said so in `source`.
"""

import os
import shutil
import subprocess
from pathlib import Path

from stoker.errors import RequestError
from stoker.plan.catalog import GIB, Box, boxes

MEMINFO = Path("/proc/meminfo")
PLAIN_CPU_GB_S = 40.0  # two channels of DDR4 or half of DDR5: what no desktop falls below
UNIFIED = ("gb10", "gh200", "thor")


def this_machine(meminfo: str | None = None, smi: str | None = None) -> Box:
    """The texts are those of /proc/meminfo and of nvidia-smi; given by tests, read here otherwise."""
    memory = _meminfo(MEMINFO.read_text() if meminfo is None and MEMINFO.exists() else meminfo or "")
    cards = _cards(_nvidia_smi() if smi is None else smi)
    if not cards and not memory:
        raise RequestError("this machine tells neither memory nor a graphics card; name a box with --box.")
    if cards and not any(word in cards[0][0].lower() for word in UNIFIED):
        return _card_box(cards)
    return _memory_box(memory, cards[0][0] if cards else "")


def _card_box(cards: list[tuple[str, float, float]]) -> Box:
    name, total, free = cards[0]
    known = _known(name)
    peak = known.bandwidth_gb_s if known else 300.0
    said = f"bandwidth as {known.name}'s" if known else "bandwidth unknown, 300 GB/s assumed"
    return Box(
        key="this",
        name=f"this machine: {len(cards)}x {name}" if len(cards) > 1 else f"this machine: {name}",
        architecture=known.architecture if known else "unknown",
        unified=False,
        devices=len(cards),
        memory_gb=round(sum(card[1] for card in cards) * GIB / 1e9, 1),
        visible_gib=sum(card[1] for card in cards),
        usable_gib=sum(card[2] for card in cards),
        reserve_gib=sum(card[1] - card[2] for card in cards) + 0.5 * len(cards),
        bandwidth_gb_s=peak,
        achievable_gb_s=known.achievable_gb_s if known else 0.8 * peak,
        tflops_bf16=known.tflops_bf16 if known else 50.0,
        price_usd=0.0,
        power_w=known.power_w if known else 0.0,
        power_idle_w=known.power_idle_w if known else 0.0,
        link_gb_s=known.link_gb_s or 16.0 if known else 16.0,
        date="now",
        source=f"nvidia-smi: {total:.1f} GiB, {free:.1f} free, per card; {said}",
    )


def _memory_box(memory: dict[str, int], card: str) -> Box:
    total, free = memory.get("MemTotal", 0) / GIB, memory.get("MemAvailable", 0) / GIB
    known = _known(card) if card else None
    cores = os.cpu_count() or 1
    peak = known.bandwidth_gb_s if known else PLAIN_CPU_GB_S
    said = f"bandwidth as {known.name}'s" if known else f"bandwidth unknown, {PLAIN_CPU_GB_S:.0f} GB/s assumed"
    return Box(
        key="this",
        name=f"this machine: {card or f'{cores} CPU cores'}",
        architecture=known.architecture if known else "cpu",
        unified=True,
        devices=1,
        memory_gb=round(total * GIB / 1e9, 1),
        visible_gib=total,
        usable_gib=free,
        reserve_gib=total - free + min(4.0, 0.1 * total),
        bandwidth_gb_s=peak,
        achievable_gb_s=known.achievable_gb_s if known else 0.7 * peak,
        tflops_bf16=known.tflops_bf16 if known else 0.1 * cores,
        price_usd=0.0,
        power_w=known.power_w if known else 0.0,
        power_idle_w=0.0,
        date="now",
        source=f"/proc/meminfo: {total:.1f} GiB, {free:.1f} available; {said}",
    )


def _known(card: str) -> Box | None:
    """The box of the catalogue with such a device."""
    words = card.lower().replace("nvidia", "").replace("geforce", "")
    for box in boxes():
        marks = [mark for mark in (*box.aliases, box.key) if any(c.isdigit() for c in mark) and len(mark) >= 4]
        if box.devices == 1 and any(mark.replace("-", "") in words.replace(" ", "").replace("-", "") for mark in marks):
            return box
    return None


def _meminfo(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            found[name] = int(number[0]) * 1024
    return found


def _cards(text: str) -> list[tuple[str, float, float]]:
    """name, total GiB, free GiB. A unified device reports no memory of its own ([N/A])."""
    cards = []
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            total, free = (float(p) / 1024 if p.replace(".", "").isdigit() else 0.0 for p in parts[1:])
            cards.append((parts[0], total, free))
    return cards


def _nvidia_smi() -> str:
    if not (program := shutil.which("nvidia-smi")):
        return ""
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
