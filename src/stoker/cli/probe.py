"""`stoker probe`: what this box is, how fast it is now, and whether others measured more."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.progress import error_console, output_console
from stoker.errors import visible
from stoker.up.probe_readings import shown

if TYPE_CHECKING:
    from stoker.up.probe_readings import BoxProbe, Card, Speed

GIB = 1 << 30


def probe(
    box: Annotated[
        str | None, typer.Option("--box", help="What this box is, if it is not recognised: spark, strix-halo, ...")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A file or folder of weights, whose disk is measured, or demo.")
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", help="The Python whose torch measures memory, as that of a vLLM.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure memory and disk of this box for a few seconds, and compare them with what others measured."""
    import sys

    import msgspec

    from stoker.demo import checkpoint_at
    from stoker.up.probe import probe_box

    console = error_console()
    with console.status("cards and memory") as status:
        found = probe_box(box, checkpoint_at(model) if model else None, python or sys.executable, told=status.update)
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2))
        return
    output = output_console()
    for line in lines(found):
        output.print(visible(line, keep=""), markup=False, soft_wrap=True)


def lines(probe: "BoxProbe") -> Iterator[str]:
    known = probe.published
    yield f"This box, measured in {probe.seconds:.0f} s" + (f", beside {known.name} as published" if known else "")
    processor, memory = probe.processor, probe.memory
    yield _row("processor", f"{processor.name}, {processor.cores} cores, {processor.architecture}")
    amount = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    shared = "shared with the accelerator, " if memory.unified else ""
    yield _row(
        "memory", f"{amount}, {shared}{memory.locked / GIB:.1f} locked, {memory.swap_used / GIB:.1f} swapped out"
    )
    for card in probe.cards:
        yield _row("card", ", ".join(_card(card)))
    for speed in probe.speeds:
        yield _row(speed.device, _speed(speed))
    if known:
        each = " per device" if known.devices > 1 else ""
        rates = f"{known.achievable_gb_s:.0f} GB/s{each} of {known.bandwidth_gb_s:.0f} on paper"
        yield _row("published", f"{rates}, {known.memory_gib:g} GiB ({known.source})")
    if disk := probe.disk:
        how = "past the page cache" if disk.direct else "through the page cache"
        yield _row("disk", f"reads {disk.read_gb_s:.2f} GB/s {how} ({disk.file}), measured here")
    for problem in probe.problems:
        yield f"  not measured: {problem}."
    for finding in probe.findings:
        yield f"  {finding.kind}: {finding.text}."


def _row(name: str, text: str) -> str:
    return f"  {name:<10} {text}"


def _speed(speed: "Speed") -> str:
    name = f"{speed.name} " if speed.name else ""
    return (
        f"{name}reads weights at {shown(speed.gemv_gb_s)} GB/s (GEMV) and copies at {shown(speed.copy_gb_s)}, "
        f"measured here with {speed.library}"
    )


def _card(card: "Card") -> Iterator[str]:
    yield card.name
    if card.total and card.free is not None:
        yield f"{card.free / GIB:.1f} of {card.total / GIB:.1f} GiB free"
    if card.watts:
        yield f"{card.watts:.0f} W" + (f" of {card.limit_watts:.0f}" if card.limit_watts else "")
    if card.clock_mhz:
        yield f"{card.clock_mhz:,} MHz" + (f" of {card.highest_clock_mhz:,}" if card.highest_clock_mhz else "")
    if card.temperature_c is not None:
        yield f"{card.temperature_c} °C"
