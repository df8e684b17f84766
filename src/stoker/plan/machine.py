"""The machine this runs on, as a box: memory as the system and its cards tell it, bandwidth from known devices.

What cannot be found out is assumed low and said so in `source`.
"""

import os
from collections.abc import Sequence

from stoker.cards import Card, nvidia_cards
from stoker.errors import RequestError
from stoker.plan.catalog import GIB, Box, boxes

PLAIN_CPU_GB_S = 40.0  # two channels of DDR4 or half of DDR5: what no desktop falls below
PLAIN_CPU_SHARE = 0.7  # of it, that large reads reach
UNIFIED = ("gb10", "gh200", "thor")


def this_machine() -> Box:
    import psutil

    memory = psutil.virtual_memory()
    return box_of(memory.total, memory.available, nvidia_cards())


def box_of(total: int, available: int, cards: Sequence[Card]) -> Box:
    """A machine with that much host memory, in bytes, and these cards."""
    if not cards and not total:
        raise RequestError("this machine tells neither memory nor a graphics card; name a box with --box.")
    if cards and not any(word in cards[0].name.lower() for word in UNIFIED):
        return _card_box(cards)
    return _memory_box(total / GIB, available / GIB, cards[0].name if cards else "")


def _card_box(cards: Sequence[Card]) -> Box:
    name, total, free = cards[0].name, sum(card.total for card in cards) / GIB, sum(card.free for card in cards) / GIB
    known = known_box(name)
    peak = known.bandwidth_gb_s if known else 300.0
    said = f"bandwidth as {known.name}'s" if known else "bandwidth unknown, 300 GB/s assumed"
    return Box(
        key="this",
        name=f"this machine: {len(cards)}x {name}" if len(cards) > 1 else f"this machine: {name}",
        architecture=known.architecture if known else "unknown",
        unified=False,
        devices=len(cards),
        memory_gb=round(total * GIB / 1e9, 1),
        visible_gib=total,
        usable_gib=free,
        reserve_gib=total - free + 0.5 * len(cards),
        bandwidth_gb_s=peak,
        achievable_gb_s=known.achievable_gb_s if known else 0.8 * peak,
        tflops_bf16=known.tflops_bf16 if known else 50.0,
        power_w=known.power_w if known else 0.0,
        power_idle_w=known.power_idle_w if known else 0.0,
        link_gb_s=known.link_gb_s or 16.0 if known else 16.0,
        date="now",
        source=f"NVML: {total:.1f} GiB, {free:.1f} free, on {len(cards)} card{'s' if len(cards) > 1 else ''}; {said}",
    )


def _memory_box(total: float, free: float, card: str) -> Box:
    """`total` and `free` in GiB."""
    known = known_box(card) if card else None
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
        achievable_gb_s=known.achievable_gb_s if known else PLAIN_CPU_SHARE * peak,
        tflops_bf16=known.tflops_bf16 if known else 0.1 * cores,
        power_w=known.power_w if known else 0.0,
        power_idle_w=0.0,
        date="now",
        source=f"the system: {total:.1f} GiB, {free:.1f} available; {said}",
    )


def known_box(card: str, devices: int = 1) -> Box | None:
    """The box of the catalogue with so many such devices."""
    words = card.lower().replace("nvidia", "").replace("geforce", "")
    for box in boxes():
        marks = [mark for mark in (*box.aliases, box.key) if any(c.isdigit() for c in mark) and len(mark) >= 4]
        found = any(mark.replace("-", "") in words.replace(" ", "").replace("-", "") for mark in marks)
        if box.devices == devices and found:
            return box
    return None
