"""What was measured beside what the planner knows of such a box, as sentences. docs/operations.md lists the limits."""

from collections.abc import Iterator, Sequence

from stoker.cards import POWER_LIMIT
from stoker.plan.catalog import GIB, Box, find_box
from stoker.plan.machine import PLAIN_CPU_GB_S, PLAIN_CPU_SHARE, known_box
from stoker.up.probe_readings import BoxProbe, Card, Finding, Published, Speed, percent, shown
from stoker.up.watch import LOW_SHARE, LOW_WATTS

SLOW = 0.8  # of what others measured; runs on one box differ by 6 to 7 %, and libraries by as much
APART = 0.7  # of the rate of copies: weights are read at about the same, so the processor is slow, not the memory
IMPOSSIBLE = 1.05  # of the bandwidth on paper
LOW_LIMIT = 0.8  # of the limit that the card came with
LOW_CLOCK = 0.5  # of the highest; a clock locked at two thirds of it costs nothing
HOT_C = 85
BUSY_CARD, BUSY_CPU = 20, 50  # percent before the measurement
SMALL_MEMORY = 0.97  # of what owners of such a box see
SLOW_DISK_GB_S = 1.0
SWAPPED = GIB  # bytes


def published(box: str | None, names: Sequence[str], devices: int) -> Published | None:
    """What is known of the box that was named, or else of one with so many such devices, or with one of them."""
    if box:
        return _published(find_box(box))
    counts = dict.fromkeys((devices, 1))
    known = [found for count in counts for name in names if name and (found := known_box(name, count))]
    return _published(known[0]) if known else None


def _published(box: Box) -> Published | None:
    if box.key == "this":
        return None
    return Published(
        box=box.key,
        name=box.name,
        bandwidth_gb_s=box.bandwidth_gb_s,
        achievable_gb_s=box.achievable_gb_s,
        memory_gib=box.visible_gib,
        devices=box.devices,
        unified=box.unified,
        source=box.source,
    )


def findings(probe: BoxProbe) -> list[Finding]:
    """Warnings first."""
    found = [*_box(probe), *_memory(probe), *_disk(probe)]
    for speed in probe.speeds:
        found += _speed(speed, probe)
    for card in probe.cards:
        found += _card(card)
    return sorted(found, key=lambda each: each.kind != "warning")


def _warning(text: str) -> Finding:
    return Finding("warning", text)


def _note(text: str) -> Finding:
    return Finding("note", text)


def _box(probe: BoxProbe) -> Iterator[Finding]:
    known = probe.published
    if known is None:
        yield _note(
            "the planner knows no box like this one, so nothing is compared with what others measured; if it is one "
            "of those that stoker plan knows, name it, as in --box spark"
        )
    for card in probe.cards:
        if (card.busy_percent or 0) >= BUSY_CARD:
            yield _note(f"{card.name} was {card.busy_percent} % busy before the measurement, which makes it look slow")
    if probe.processor.busy_percent >= BUSY_CPU:
        busy = probe.processor.busy_percent
        yield _note(f"the processor was {busy:.0f} % busy before the measurement, which makes the box look slow")


def _speed(speed: Speed, probe: BoxProbe) -> Iterator[Finding]:
    known = probe.published
    if known is None:
        if speed.device == "cpu" and not probe.cards:
            assumed = PLAIN_CPU_SHARE * PLAIN_CPU_GB_S
            yield _note(
                f"stoker plan --box this assumes {assumed:.0f} GB/s here; {shown(speed.gemv_gb_s)} were measured"
            )
        return
    if speed.device == "cpu":
        yield _note(f"only the processor was measured, so nothing is known of the speed of {known.name}'s accelerator")
        return
    of = f" on {speed.device}" if len(probe.speeds) > 1 else ""
    share, copies = speed.gemv_gb_s / known.achievable_gb_s, speed.copy_gb_s / known.achievable_gb_s
    rates = f"({shown(speed.gemv_gb_s)} of {known.achievable_gb_s:.0f} GB/s)"
    if max(speed.gemv_gb_s, speed.copy_gb_s) > IMPOSSIBLE * known.bandwidth_gb_s:
        most = max(speed.gemv_gb_s, speed.copy_gb_s)
        yield _warning(
            f"{most:.0f} GB/s were measured, more than the {known.bandwidth_gb_s:.0f} that {known.name} has on paper: "
            "it is another box; name the right one with --box"
        )
        return
    said = f"this box reads weights{of} at {percent(share)} of what others measured {rates}"
    if share >= SLOW:
        yield _note(said)
    elif copies >= SLOW and speed.gemv_gb_s < APART * speed.copy_gb_s:
        yield _warning(
            f"{said}, while copies run at {percent(copies)}: the memory is well and the processor of the card slow; "
            "check the power supply or the clocks"
        )
    else:
        yield _warning(f"{said}; check the power supply or the clocks, and whether something else uses the memory")


def _card(card: Card) -> Iterator[Finding]:
    if card.limit_watts and card.default_limit_watts and card.limit_watts < LOW_LIMIT * card.default_limit_watts:
        yield _warning(
            f"{card.name} is limited to {card.limit_watts:.0f} W, and came with {card.default_limit_watts:.0f}; "
            "nvidia-smi --power-limit changes it"
        )
    least = LOW_SHARE * card.limit_watts if card.limit_watts else LOW_WATTS
    if card.watts is not None and card.watts < least:
        of = f" of {card.limit_watts:.0f} W" if card.limit_watts else " W"
        yield _warning(
            f"{card.name} drew no more than {card.watts:.0f}{of} while weights were read: check its power supply"
        )
    if card.clock_mhz and card.highest_clock_mhz and card.clock_mhz < LOW_CLOCK * card.highest_clock_mhz:
        yield _warning(
            f"{card.name} ran at no more than {card.clock_mhz:,} of {card.highest_clock_mhz:,} MHz while weights were "
            "read: check its power supply, its temperature and locked clocks (nvidia-smi --reset-gpu-clocks)"
        )
    if card.held_back_by:
        text = f"{card.name} was held back by {' and '.join(card.held_back_by)} while weights were read"
        yield _note(text) if card.held_back_by == (POWER_LIMIT,) else _warning(text)  # a limit may be meant
    if card.temperature_c is not None and card.temperature_c >= HOT_C:
        yield _warning(f"{card.name} is at {card.temperature_c} °C: check its cooling")


def _memory(probe: BoxProbe) -> Iterator[Finding]:
    memory, known = probe.memory, probe.published
    if known and known.unified and memory.total < SMALL_MEMORY * known.memory_gib / known.devices * GIB:
        per_box = known.memory_gib / known.devices
        yield _warning(
            f"this box shows {memory.total / GIB:.1f} GiB of memory, and others see {per_box:.1f}: firmware may keep "
            "a part for graphics"
        )
    if memory.swap_used >= SWAPPED:
        yield _warning(
            f"{memory.swap_used / GIB:.1f} GiB are swapped out: something needs more memory than there is, and what "
            "is swapped comes back while the model runs"
        )


def _disk(probe: BoxProbe) -> Iterator[Finding]:
    disk = probe.disk
    if disk and disk.read_gb_s < SLOW_DISK_GB_S:
        cached = "" if disk.direct else " (through the page cache)"
        seconds = 70 / disk.read_gb_s
        yield _note(f"the disk reads {disk.read_gb_s:.2f} GB/s{cached}: 70 GB of weights take {seconds:,.0f} s")
